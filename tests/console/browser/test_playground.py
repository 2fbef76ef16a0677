"""The playground in a real browser, with models that answer."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gateway.accounts.accounts import change_account, create_account
from gateway.accounts.keys import create_key
from gateway.accounts.limits import Limit, set_limit
from gateway.audit_log import Author
from gateway.ledger.transfers import add_credit
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import Database
from tests.artist import png
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Watched
from tests.console.seeding import HOSTILE, Seeded
from tests.databases import Databases
from tests.gateway.test_pictures import SOLD, Service, data_uri
from tests.stack import PEPPER, running

IMAGE = """\
  - name: pocket-image
    task: text-to-image
    also: [image-edit]
    engine: diffusion
    checkpoint: POCKET/image
    options: {slots: 1}
    sizes: ["64x64"]
    limits: {images: 2, steps: 4, guidance: 10, characters: 500}
    default_parameters: {steps: 1, guidance: 1}
    price: [{unit: image, amount: "0.0004"}]
    vocabulary: {words: [a, red, circle]}
    examples: [{prompt: a red circle}]
"""
SECOND = IMAGE.replace("pocket-image", "second-image")
SPEECH = """\
  - name: pocket-speech
    task: text-to-speech
    also: [voice-clone]
    engine: speech
    checkpoint: POCKET/speech
    options: {languages: [en], slots: 2, voices: {ada: {embedding: voices/ada.safetensors}}}
    limits: {characters: 500, seconds: 60}
    price: [{unit: character, amount: "0.001", per: 1000}]
"""
MORE = """\
  - name: pocket-music
    task: text-to-music
    engine: music
    checkpoint: POCKET/music
    limits: {seconds: 10, characters: 200}
    price: [{unit: audio_second, amount: "0.0002"}]
  - name: pocket-video
    task: text-to-video
    engine: diffusion
    checkpoint: POCKET/video
    sizes: ["64x64"]
    limits: {seconds: 2, fps: 8, steps: 4, guidance: 10}
    default_parameters: {seconds: 1, fps: 8, steps: 2, guidance: 1}
    price: [{unit: video_second, amount: "0.001"}]
  - name: pocket-talking
    task: talking-head
    engine: talking
    checkpoint: POCKET/talking
    limits: {seconds: 5, fps: 30}
    price: [{unit: video_second, amount: "0.001"}]
  - name: head
    task: talking-head
    price: steps
    workflow:
      inputs: {image: {type: image}, text: {type: text}}
      steps:
        - {name: speak, model: pocket-speech, input: {text: "${inputs.text}", format: wav}}
        - model: pocket-talking
          name: show
          input: {image: "${inputs.image}", audio: "${steps.speak}"}
      output: ${steps.show}
"""
CHAT = """\
  - name: pocket-chat
    task: text-generation
    engine: llm
    checkpoint: POCKET/chat
    options: {dtype: float32, slots: 1}
    limits: {context_tokens: 256, output_tokens: 64}
    price:
      - {unit: input_token, amount: "0.02", per: 1000000}
      - {unit: output_token, amount: "0.08", per: 1000000}
"""
NOVEL = """\
  - name: novel
    task: text-generation
    engine: echo
    options: {tokens_per_step: 40, step_us: 20000}
    limits: {context_tokens: 40000, output_tokens: 12000}
    price:
      - {unit: input_token, amount: "0.02", per: 1000000}
      - {unit: output_token, amount: "0.08", per: 1000000}
"""
POCKET = Path(__file__).parents[3] / "workers" / "pocket"
PORTRAIT = Path(__file__).parents[3] / "docs" / "img" / "portrait.png"
PLAY = "/console/playground"


@pytest.fixture(scope="module")
def looking() -> Iterator[Service]:
    """Somebody else's model, which sees pictures."""
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield service
        service.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, looking: Service
) -> Iterator[Site]:
    """A gateway and a worker, and an account with credit."""
    directory = tmp_path_factory.mktemp("playground")
    url = Databases("sqlite", directory, postgres).make()
    database = Database(url)
    with database.transaction() as connection:
        atlas = create_account(connection, "atlas")
        add_credit(
            connection,
            atlas.id,
            NANOS_PER_USD,
            kind="topup",
            key="one",
            actor="test",
            reason="test",
        )
    database.dispose()
    name = f"t{uuid.uuid4().hex[:8]}"
    models = (IMAGE + SECOND + SPEECH + MORE + CHAT + NOVEL).replace("POCKET", str(POCKET))
    models += SOLD.format(url=looking.url)
    with running(
        directory, url, valkey, namespace=name, more_models=models, patience_s=120
    ) as stack:
        yield Site(stack.url, url, Seeded({"atlas": atlas}, {}, {}))


def charged(page: Page) -> str:
    """Wait for the end of the newest order; return its cost, as the page shows it."""
    found = page.locator("#made .charged").last
    expect(found).to_have_text(re.compile(r"^\$"), timeout=30_000)
    return found.inner_text()


def open_receipt(page: Page) -> None:
    page.locator("#made").get_by_role("link", name="receipt").last.click()
    page.wait_for_url("**/console/requests/req_*")


def test_chat_streams_and_ends_with_the_cost_of_its_receipt(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill(f"one two {HOSTILE}")
    expect(page.locator("#price")).to_contain_text("Costs at most $")
    page.get_by_role("button", name="Send").click()
    cost = charged(page)
    first = page.locator("#made .answered").inner_text()
    assert HOSTILE in first
    page.get_by_label("Message").fill("three")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#made .charged")).to_have_count(2)
    second = charged(page)

    assert page.locator("#made article").count() == 4
    assert page.locator("#made [onerror]").count() == 0
    assert watched.inspect() == []
    assert second != cost
    open_receipt(page)
    expect(page.locator("main")).to_contain_text(second)
    page.get_by_role("link", name="Try again").click()
    expect(page.locator("main")).to_contain_text("What was sent then is not kept")


DROPPED = """\
(field, [name, bytes]) => {
  const given = new DataTransfer();
  given.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
  field.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
}
"""  # noqa: E501
PASTED = DROPPED.replace("DragEvent", "ClipboardEvent").replace(
    '"drop", { dataTransfer', '"paste", { clipboardData'
)


def keep_inputs(site: Site, *, wanted: bool) -> None:
    database = Database(site.database_url)
    with database.transaction() as connection:
        change_account(connection, site.seeded.accounts["atlas"].id, keep_inputs=wanted)
    database.dispose()


def seen(service: Service) -> list[str]:
    """Return the pictures that the model was last sent, in their order."""
    messages = service.bodies[-1]["messages"]
    parts = [
        part for each in messages if isinstance(each["content"], list) for part in each["content"]
    ]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_pictures_are_sent_with_a_message_and_again_with_the_next(
    site: Site, enter: Enter, looking: Service
) -> None:
    one, two = png(16, 16, 7), png(8, 8, 3)
    keep_inputs(site, wanted=True)
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=looker")
    field = page.get_by_label("Pictures")

    page.get_by_label("Message").fill("What is it?")
    expect(page.locator("#price")).to_contain_text("Costs at most $")
    without = page.locator("#price").inner_text()
    field.set_input_files(files={"name": "one.png", "mimeType": "image/png", "buffer": one})
    expect(page.locator("form .shelf img")).to_have_count(1)
    expect(page.locator("#price")).not_to_have_text(without)
    expect(page.locator('[data-code="Python"]')).to_contain_text('data_uri("one.png")')
    page.get_by_role("button", name="Send").click()
    first = charged(page)

    assert seen(looking) == [data_uri(one)]
    said = page.locator("#made [data-role=user]").first
    assert (
        said.locator("img").evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 16
    )
    expect(page.locator("form .shelf img")).to_have_count(0)

    page.get_by_label("Message").evaluate(PASTED, ["two.png", list(two)])
    page.get_by_label("Message").fill("And this?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .charged")).to_have_count(2)
    assert seen(looking) == [data_uri(one), data_uri(two)]
    assert watched.inspect() == []
    said.get_by_role("button", name="Edit").click()
    page.get_by_label("Message", exact=True).last.fill("Which colour is it?")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.locator("#made .charged")).to_have_count(1)
    expect(page.locator("#made .said")).to_have_text("Which colour is it?")
    assert seen(looking) == [data_uri(one)]
    assert looking.bodies[-1]["messages"][-1]["content"][0]["text"] == "Which colour is it?"

    expect(page.locator("#made .charged")).to_have_text(first)
    open_receipt(page)
    expect(page.locator("main")).to_contain_text(first)
    page.get_by_role("link", name="Try again").click()
    again = page.locator("#made [data-role=user]")
    expect(again).to_contain_text("Which colour is it?")
    assert (
        again.locator("img").evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 16
    )
    page.get_by_role("button", name="Send").click()
    charged(page)
    assert seen(looking) == [data_uri(one)]
    assert watched.inspect() == []
    keep_inputs(site, wanted=False)


def test_model_that_reads_no_pictures_says_so(site: Site, enter: Enter, looking: Service) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=echo")
    expect(page.locator("#play")).to_contain_text("echo reads no pictures; looker does.")

    page.get_by_label("Message").fill("kept")
    page.get_by_label("Message").evaluate(DROPPED, ["one.png", list(png(8, 8))])

    expect(page.locator("#refusal")).to_have_text("echo reads no pictures.")
    expect(page.get_by_label("Message")).to_have_value("kept")
    page.goto(f"{PLAY}?model=looker&beside=echo")
    page.get_by_label("Message").fill("What is it?")
    page.get_by_label("Pictures").evaluate(DROPPED, ["one.png", list(png(8, 8))])
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#refusal")).to_contain_text("echo: echo reads no images")
    expect(page.locator("#made .charged")).to_have_count(1)


def test_picture_that_was_made_is_asked_about(site: Site, enter: Enter, looking: Service) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-image")
    page.get_by_role("button", name="Order").click()
    charged(page)

    page.get_by_role("link", name="Ask about this").click()
    page.get_by_label("Message").fill("What is it?")
    page.get_by_role("button", name="Send").click()
    charged(page)

    assert page.url.find("task=text-generation") > 0
    assert [each[:15] for each in seen(looking)] == ["data:image/png;"]
    page.get_by_label("Message").fill("Sure?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .charged")).to_have_count(2)
    assert len(seen(looking)) == 1


TICKS = """\
() => {
  window.ticks = [];
  new MutationObserver(() => {
    const text = [...document.querySelectorAll("#made article .hint")].at(-1)?.textContent ?? "";
    if (text.includes("so far")) window.ticks.push(text);
  }).observe(document.getElementById("made"), { subtree: true, childList: true });
}
"""
MARKDOWN = """\
# Prices

| model | price |
| --- | --- |
| **echo** | `0.02` |

1. one
   - two

```python
<b>code</b>
```

See [this](https://example.com/x) and [that](javascript:alert(1))."""


def test_cost_ticks_up_to_that_of_the_receipt(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=slow")
    page.evaluate(TICKS)

    page.get_by_label("Message").fill("one two three four five six seven eight")
    page.get_by_role("button", name="Send").click()
    final = charged(page)

    ticks = page.evaluate("() => window.ticks")
    found = [re.match(r"\$([\d.]+) so far of at most \$([\d.]+)", tick) for tick in ticks]
    costs = [float(each[1]) for each in found if each]
    assert len(costs) == len(ticks) > 2
    assert costs == sorted(costs)
    assert costs[-1] <= float(final[1:]) <= min(float(each[2]) for each in found if each)
    expect(page.locator("#made .hint").last).to_contain_text("first token after")

    page.get_by_label("Message").fill("nine ten " * 40)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .hint").last).to_contain_text("so far of at most")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#made .hint").last).to_contain_text("Stopped; what had come is charged")
    expect(page.locator("#made [data-role=assistant]").last).to_contain_text("nine")


def test_models_answer_beside_each_other_and_messages_have_branches(
    site: Site, enter: Enter
) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=echo&beside=slow")

    page.get_by_label("Message").fill(MARKDOWN)
    expect(page.locator("#price")).to_contain_text("slow costs at most $")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .charged")).to_have_count(2)
    columns = page.locator("#made .column")
    expect(columns).to_have_count(2)
    shown = columns.first.locator(".formatted")
    expect(shown.locator("h3")).to_have_text("Prices")
    expect(shown.locator("td strong")).to_have_text("echo")
    expect(shown.locator("ol > li ul > li")).to_have_text("two")
    expect(shown.locator("pre")).to_have_text("<b>code</b>")
    assert shown.locator("a").count() == 1
    expect(shown.locator("p").last).to_have_text(
        "See this (https://example.com/x) and [that](javascript:alert(1))."
    )
    assert watched.inspect() == []
    columns.first.get_by_role("button", name="As text").click()
    expect(columns.first.locator("div.answered")).to_have_text(MARKDOWN, use_inner_text=True)

    first = columns.first
    first.get_by_role("button", name="Edit").first.click()
    first.get_by_label("Message").fill("two")
    first.get_by_role("button", name="Send as a branch").click()
    expect(first.locator(".charged")).to_have_count(1)
    expect(first.locator(".said")).to_have_text("two")
    expect(first.locator(".acts").first).to_contain_text("2 of 2")
    first.get_by_role("button", name="Previous branch").first.click()
    expect(first.locator(".said")).to_contain_text("# Prices")
    expect(columns.last.locator(".said")).to_contain_text("# Prices")
    first.get_by_role("button", name="Delete").last.click()
    expect(first.locator("article")).to_have_count(1)


def test_each_token_has_its_log_probability(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-chat&logprobs=true&top_logprobs=2")

    page.get_by_label("Message").fill("Hello")
    page.get_by_label("At most, tokens").fill("5")
    page.get_by_role("button", name="Send").click()
    charged(page)
    page.locator("#made summary", has_text="Log probabilities").press("Enter")

    rows = page.locator("#made .tokens tbody tr")
    expect(rows.first.get_by_role("rowheader")).to_have_text(re.compile(r'^".+"$'))
    tokens = [json.loads(text) for text in rows.get_by_role("rowheader").all_inner_texts()]
    answered = page.locator("#made [data-role=assistant] .answered").text_content() or ""
    assert "".join(tokens).strip() == answered.strip()
    row = re.compile(r"-?\d+\.\d{4}\s*\d+\.\d%\s*\".+\" \d+\.\d%")
    expect(rows.first).to_contain_text(row)
    assert watched.inspect() == []
    open_receipt(page)
    page.locator(".tokens summary").click()
    expect(page.locator(".tokens tbody tr")).to_have_count(len(tokens))
    assert watched.inspect() == []


def test_tools_are_called_and_answered(site: Site, enter: Enter) -> None:
    """The call itself is put into the page's stream: no small model calls reliably."""
    page = enter("member")
    ended = {"status": "succeeded", "cost": "$0.1", "took": "1 s", "speed": "", "unknown": []}
    ended |= {"tokens": [], "phases": [], "held": "$1", "released": "$0.9"}
    calls = [{"id": "call_1", "name": "weather", "arguments": '{"city":"Rome"}'}]
    stream = [
        ("accepted", {"path": "/x", "most": "", "held": "$1"}),
        ("text", {"text": "", "calls": calls}),
    ]
    body = "".join(
        f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in [*stream, ("ended", ended)]
    )
    page.goto(f"{PLAY}?model=echo")
    page.route(f"**{PLAY}/order", lambda route: route.fulfill(body=body), times=1)

    page.get_by_label("Message").fill("How is it in Rome?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .call")).to_contain_text('"city": "Rome"')
    page.get_by_label("Its result").fill("sunny")
    with page.expect_request(f"**{PLAY}/order") as sent:
        page.get_by_role("button", name="Send result").click()
    posted = sent.value.post_data_buffer or b""

    assert b'"tool_call_id":"call_1","content":"sunny"' in posted
    expect(page.locator("#made .charged")).to_have_count(2)


@pytest.mark.long
def test_ten_thousand_tokens_stay_fluent(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=novel")
    text = " ".join(
        f"w{number % 97}" + "\n" * (number % 40 == 39) for number in range(10_000)
    ).strip()
    frames = """() => { window.frames_seen = 0; const count = () => {
      window.frames_seen += 1; requestAnimationFrame(count); }; count(); }"""

    page.get_by_label("Message").fill(text)
    page.evaluate(frames)
    began = time.monotonic()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .charged")).to_have_count(1, timeout=120_000)
    frames = page.evaluate("() => window.frames_seen") / (time.monotonic() - began)

    answered = page.locator("#made [data-role=assistant] .answered").text_content()
    assert answered == text
    assert frames > 0


def test_picture_appears_and_unknown_words_are_named(site: Site, enter: Enter) -> None:
    page = enter("member", color_scheme="dark", viewport={"width": 390, "height": 844})
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image")

    page.get_by_label("Prompt").first.fill("a red elephant")
    expect(page.locator("#price")).to_have_text("Costs at most $0.0004")
    expect(page.locator("#unknown")).to_contain_text("elephant")
    page.locator("#code summary").click()
    expect(page.locator('[data-code="curl"]')).to_contain_text("$TOLLGATE_API_KEY")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.0004"
    picture = page.locator("#made img")
    expect(picture).to_be_visible()
    assert picture.evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 64
    expect(page.locator("#history")).to_contain_text("pocket-image")
    assert watched.inspect() == []


def test_picture_is_uploaded_and_changed(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image&task=image-edit")

    page.get_by_label("Picture").set_input_files(
        files={"name": "one.png", "mimeType": "image/png", "buffer": png(64, 64)}
    )
    page.get_by_label("Prompt").first.fill("a red circle")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.0004"
    expect(page.locator("#made img")).to_be_visible()
    open_receipt(page)
    expect(page.locator("main")).to_contain_text("image-edit")
    page.get_by_role("link", name="Try again").click()
    expect(page.get_by_label("Prompt").first).to_have_value("a red circle")
    expect(page.locator("[data-origin]")).to_contain_text("The file that was sent then")
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"
    assert watched.inspect() == []


PAINTED = """\
async () => {
  const file = document.getElementById("field-mask").files[0];
  const picture = await createImageBitmap(file);
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  canvas.getContext("2d").drawImage(picture, 0, 0);
  const { data } = canvas.getContext("2d").getImageData(0, 0, picture.width, picture.height);
  return [picture.width, picture.height, [...data].filter((_, at) => at % 4 === 3)];
}
"""


def iou(page: Page, expected: set[tuple[int, int]]) -> float:
    """Return how far the mask that is sent covers the expected pixels of the source."""
    expect(page.locator(".stage")).to_have_attribute("aria-busy", "false")
    width, height, alpha = page.evaluate(PAINTED)
    assert (width, height) == (256, 192)
    painted = {(at % width, at // width) for at, value in enumerate(alpha) if value == 0}
    assert set(alpha) <= {0, 255}
    return len(painted & expected) / len(painted | expected)


def capsule(
    start: tuple[float, float], end: tuple[float, float], width: float
) -> set[tuple[int, int]]:
    """Return the pixels of a round stroke between two points."""
    (ax, ay), (bx, by) = start, end
    length = (bx - ax) ** 2 + (by - ay) ** 2
    found = set()
    for x, y in itertools.product(range(256), range(192)):
        px, py = x + 0.5 - ax, y + 0.5 - ay
        along = min(1, max(0, (px * (bx - ax) + py * (by - ay)) / length)) if length else 0
        if math.hypot(px - along * (bx - ax), py - along * (by - ay)) <= width / 2:
            found.add((x, y))
    return found


def test_mask_is_drawn_by_mouse_and_keyboard(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image&task=image-edit")
    page.get_by_label("Picture").set_input_files(
        files={"name": "one.png", "mimeType": "image/png", "buffer": png(256, 192)}
    )
    canvas = page.locator(".stage canvas").last
    page.get_by_label("Brush").fill("40")
    expect(canvas).to_be_visible()
    scale = canvas.evaluate("(each) => each.clientWidth / 256")
    canvas.hover(position={"x": 60 * scale, "y": 60 * scale})
    box = canvas.bounding_box()
    assert box is not None

    page.mouse.down()
    page.mouse.move(box["x"] + 180 * scale, box["y"] + 120 * scale, steps=6)
    page.mouse.up()
    chosen = page.locator("#field-mask")
    expect(chosen).to_have_value(re.compile("mask.png"))
    stroke = capsule((60, 60), (180, 120), 40)
    assert iou(page, stroke) >= 0.98

    page.get_by_role("button", name="Invert").click()
    everything = set(itertools.product(range(256), range(192)))
    assert iou(page, everything - stroke) >= 0.98
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Undo").click()
    expect(chosen).to_have_value("")

    canvas.focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowUp", "Shift+ArrowRight", " "):
        page.keyboard.press(key)
    expect(chosen).to_have_value(re.compile("mask.png"))
    assert iou(page, capsule((109, 86), (109, 86), 40)) >= 0.98
    assert watched.inspect() == []
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"


def test_picture_goes_on_to_be_changed(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-image")
    page.get_by_role("button", name="Order").click()
    charged(page)

    page.locator("#made figure img").click()
    expect(page.get_by_role("dialog").locator("img")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Edit this").click()
    page.wait_for_url("**from-image=req_*")
    expect(page.locator(".stage")).to_be_visible()
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"
    page.get_by_role("button", name="Before and after").click()
    expect(page.get_by_role("dialog").locator("img")).to_have_count(2)
    assert watched.inspect() == []


def record(page: Page, label: str) -> None:
    """Record with the browser's fake microphone, until there is enough."""
    field = page.locator("[data-record]", has=page.get_by_label(label))
    field.get_by_role("button", name="Record").click()
    expect(field.locator(".row .hint")).to_have_text(re.compile(r"^[34] s"))
    field.get_by_role("button", name="Stop recording").click()
    expect(field.locator("audio")).to_be_visible()


def test_voice_is_recorded_with_its_consent_and_spoken_with(site: Site, enter: Enter) -> None:
    page = enter("owner")
    watched = Watched(page)
    watched.visit(f"{PLAY}/voices")
    store = page.get_by_role("button", name="Store the voice")

    record(page, "The voice")
    record(page, "The consent")
    page.get_by_label("Name").fill("Ann")
    expect(store).to_be_disabled()
    page.get_by_label("This is my voice").check()
    assert watched.inspect() == []
    store.click()
    page.wait_for_url("**voice=voice_*")
    page.get_by_label("Text").first.fill("Good morning.")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.000013"
    sound = page.locator("#made audio").last
    expect(sound).to_have_js_property("error", None)
    assert sound.evaluate(DURATION) > 0
    assert watched.inspect() == []


DURATION = """\
(each) => each.duration > 0 ? each.duration
  : new Promise((known) => each.addEventListener("durationchange", () => known(each.duration)))
"""


PLAYED = """\
() => {
  window.played = [];
  for (const name of ["playing", "error"]) {
    document.addEventListener(name, ({ target }) => {
      if ("live" in target.dataset) window.played.push([name, target.currentSrc]);
    }, true);
  }
}
"""


@pytest.mark.parametrize("model", ["pocket-speech", "pocket-music"])
def test_sound_plays_while_it_is_made_and_is_drawn(site: Site, enter: Enter, model: str) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model={model}")
    page.evaluate(PLAYED)

    page.get_by_label("Text" if model == "pocket-speech" else "Prompt").first.fill("a calm waltz")
    page.get_by_role("button", name="Order").click()
    charged(page)

    stored = page.locator("#made .media audio")
    assert stored.evaluate(DURATION) > 0
    expect(page.locator("#made canvas").first).to_be_visible()
    expect(page.locator("#made .hint").first).to_contain_text("real-time factor")
    played = page.evaluate("() => window.played")
    assert [(name, PLAY in address) for name, address in played][:1] == [("playing", True)]
    if model == "pocket-music":
        expect(page.get_by_role("img", name=re.compile(r"^\d+ notes$"))).to_be_visible()
    assert watched.inspect() == []


def test_sample_of_a_voice_costs_what_its_button_says(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-speech&voice=ada")

    page.get_by_role("button", name="Hear this voice ($0.000034)").click()

    expect(page.get_by_label("Sample of ada, charged $0.000034")).to_be_visible()


READY = """\
(each) => each.readyState >= 2 ? each.duration
  : new Promise((known) => each.addEventListener("loadeddata", () => known(each.duration)))
"""


def test_video_is_ready_to_be_played(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=pocket-video")

    page.get_by_label("Prompt").first.fill("a red star moves left")
    page.get_by_role("button", name="Order").click()

    assert charged(page) == "$0.001"
    video = page.locator("#made video")
    assert video.evaluate(READY) == pytest.approx(1, abs=0.2)
    expect(video).to_have_attribute("poster", re.compile("/media/"))
    assert watched.inspect() == []


def test_steps_of_a_workflow_light_up_with_their_costs(site: Site, enter: Enter) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?model=head")

    page.get_by_label("Picture").set_input_files(PORTRAIT)
    page.get_by_label("Text").fill("Good morning.")
    page.get_by_role("button", name="Order").click()
    charged(page)

    for step, cost in (("speak", r"\$0\.000013"), ("show", r"\$0\.\d+")):
        node = page.locator(f'[data-step="{step}"]')
        expect(node).to_have_attribute("data-state", "succeeded")
        expect(node.locator(".told")).to_have_text(re.compile(f"^succeeded, {cost}$"))
    assert page.locator("#made video").evaluate(READY) > 0
    assert watched.inspect() == []
    page.get_by_label("Picture").set_input_files(
        files={"name": "one.png", "mimeType": "image/png", "buffer": png(8, 8)}
    )
    page.get_by_role("button", name="Order").click()
    expect(page.locator('[data-step="show"]')).to_have_attribute("data-state", "failed")
    expect(page.locator("#steps-told")).to_contain_text("show: ")


def test_denied_microphone_leaves_the_file(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.add_init_script(
        "navigator.mediaDevices.getUserMedia = () => "
        'Promise.reject(new DOMException("no", "NotAllowedError"));'
    )
    page.goto(f"{PLAY}/voices")

    page.get_by_role("button", name="Record").first.click()

    expect(page.locator("[data-record] .hint").first).to_contain_text("choose the file below")
    expect(page.locator(".sentence")).to_contain_text("I consent to atlas")


def test_code_of_the_form_gives_the_same_kind_of_output(
    site: Site, enter: Enter, tmp_path: Path
) -> None:
    database = Database(site.database_url)
    with database.transaction() as connection:
        account_id = site.seeded.accounts["atlas"].id
        secret, _ = create_key(connection, account_id, pepper=PEPPER.encode())
    database.dispose()
    environment = {**os.environ, "TOLLGATE_API_KEY": secret, "NO_PROXY": "*"}
    (tmp_path / "one.png").write_bytes(png(64, 64))
    page = enter("member")

    for query, made in (
        ("model=echo", "one two"),
        ("model=pocket-image&task=image-edit", "image/png"),
    ):
        page.goto(f"{PLAY}?{query}")
        if "edit" in query:
            page.get_by_label("Picture").set_input_files(tmp_path / "one.png")
            page.get_by_label("Prompt").first.fill("it's a red circle")
        else:
            page.get_by_label("Message").fill("one two")
        code = page.locator('[data-code="curl"]')
        expect(code).to_contain_text("red circle" if "edit" in query else "one two")
        for name, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
            text = page.locator(f'[data-code="{name}"]').text_content() or ""
            assert secret not in text
            done = subprocess.run(
                [*command, text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert made in done.stdout, f"{name}: {done.stdout} {done.stderr}"


def test_refusal_is_shown_at_the_form_and_the_text_stays(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=Veo3")

    page.get_by_label("Prompt").first.fill("a ship")
    page.get_by_role("button", name="Order").click()

    expect(page.get_by_role("alert")).to_contain_text("Veo3 is not available")
    expect(page.get_by_label("Prompt").first).to_have_value("a ship")


def test_without_scripts_the_form_leads_to_the_request(site: Site, enter: Enter) -> None:
    page = enter("member", java_script_enabled=False)
    page.goto(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill("one two")
    page.get_by_role("button", name="What does it cost?").click()
    expect(page.locator("#price")).to_contain_text("$")
    expect(page.get_by_label("Message")).to_have_value("one two")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/console/requests/req_*")
    page.wait_for_timeout(500)
    page.reload()
    expect(page.locator("#made")).to_contain_text("one two")


def test_viewer_sees_prices_but_orders_nothing(site: Site, enter: Enter) -> None:
    page = enter("viewer")
    page.goto(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill("one")

    expect(page.locator("#price")).to_contain_text("$")
    expect(page.get_by_role("button", name="Send")).to_have_count(0)


def test_hold_credit_and_phases_are_shown_for_models_beside_each_other(
    site: Site, enter: Enter
) -> None:
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?task=text-to-speech")
    available = page.locator("#available")
    expect(available).to_have_text(re.compile(r"^\$"))
    before = available.inner_text()

    page.get_by_label("Text").first.fill("good day")
    expect(page.locator("#price")).to_contain_text("$")
    page.get_by_role("button", name="Order").click()

    result = page.locator("#made article")
    charged(page)
    result.locator("summary", has_text="Time and hold").click()
    expect(result).to_contain_text("Held $")
    expect(result.locator(".waterfall tr")).not_to_have_count(0)
    expect(available).not_to_have_text(before)
    assert watched.inspect() == []


def test_two_models_make_pictures_beside_each_other(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?task=talking-head&model=head")
    assert page.locator("[data-beside]").count() == 0
    page.goto(f"{PLAY}?task=talking-head&model=pocket-talking")
    expect(page.locator("[data-beside]").first).to_contain_text("head")
    expect(page.get_by_role("button", name="Record")).to_be_visible()

    page.goto(f"{PLAY}?model=pocket-image&beside=second-image")
    page.get_by_label("Prompt").first.fill("a red circle")
    expect(page.locator("#price")).to_contain_text("second-image costs")
    page.get_by_role("button", name="Order").click()

    expect(page.locator("#made .charged")).to_have_count(2, timeout=60_000)
    names = page.locator("#made article h3").all_inner_texts()
    assert sorted(names) == ["pocket-image", "second-image"]
    assert page.locator("#made article .media img").count() == 2


def test_all_files_of_a_request_are_one_archive(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-image&task=image-edit&n=2")
    page.get_by_label("Prompt").first.fill("a red circle")
    page.get_by_label("Picture").set_input_files(
        files={"name": "../one.png", "mimeType": "image/png", "buffer": png(64, 64)}
    )
    page.get_by_role("button", name="Order").click()
    charged(page)

    with page.expect_download() as found:
        page.get_by_role("link", name="Download all files").click()
    with zipfile.ZipFile(found.value.path()) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["0.png", "1.png", "sent-0.png", "output.json"]
        assert archive.read("sent-0.png") == png(64, 64)
        assert archive.read("0.png").startswith(b"\x89PNG")
    assert re.fullmatch(r"req_\w+\.zip", found.value.suggested_filename)

    open_receipt(page)
    expect(page.get_by_role("link", name="Download all files")).to_be_visible()


def test_portrait_of_ours_is_at_hand_for_a_talking_head(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-speech")
    text = page.get_by_label("Text").first
    text.fill("Good morning.")
    expect(page.locator("#play")).to_contain_text("13 characters")
    page.get_by_role("button", name="Order").click()
    charged(page)

    page.get_by_role("link", name="To talking head").click()
    page.wait_for_url("**from-audio=req_*")
    assert "model" not in page.url
    expect(page.locator("#choose-model")).to_have_value("pocket-talking")
    page.get_by_role("link", name="a portrait of ours").click()
    expect(page.locator(".shelf img")).to_be_visible()
    page.get_by_role("button", name="Order").click()
    charged(page)
    assert page.locator("#made video").evaluate(READY) > 0

    page.goto(f"{PLAY}?model=pocket-image&task=image-edit&from-image=ours/0")
    expect(page.locator("[data-origin]")).to_contain_text("A picture of ours")
    page.get_by_label("Prompt").first.fill("a red circle")
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"


def test_upload_is_taken_to_the_playground(site: Site, enter: Enter) -> None:
    page = enter("owner")
    page.goto("/console/files")
    page.get_by_label("File", exact=False).last.set_input_files(
        files={"name": "one.png", "mimeType": "image/png", "buffer": png(64, 64)}
    )
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("link", name="Try", exact=True).click()

    page.wait_for_url("**from-image=file-*")
    picture = page.locator("[data-origin] img")
    assert picture.evaluate("(each) => each.decode().then(() => each.naturalWidth)") == 64
    page.get_by_label("Prompt").first.fill("a red circle")
    expect(page.locator('[data-code="curl"]')).to_contain_text('"image": "file-')
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"

    open_receipt(page)
    page.get_by_role("link", name="Same seed").click()
    expect(page.get_by_label("Seed")).not_to_have_value("")
    expect(page.get_by_label("Prompt").first).to_have_value("a red circle")


def test_escape_stops_an_answer(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=novel")
    page.get_by_label("Message").fill("word " * 4000)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made")).to_contain_text("so far of at most")

    page.keyboard.press("Escape")

    expect(page.locator("#made")).to_contain_text("Stopped")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_no_credit_leads_to_the_balance_and_a_limit_counts_down(site: Site, enter: Enter) -> None:
    database = Database(site.database_url)
    with database.transaction() as connection:
        poor = create_account(connection, f"poor{uuid.uuid4().hex[:6]}")
        link = create_link(
            connection,
            Author("test", "cli"),
            LinkBody.model_validate({"role": "member", "name": "poor", "account": poor.name}),
            pepper=PEPPER.encode(),
        )
    page = enter("member")
    page.goto("about:blank")
    page.goto(f"{site.url}{link['path']}")
    page.wait_for_url(lambda address: "/enter" not in address)
    page.goto(f"{PLAY}?model=echo")
    message = page.get_by_label("Message")

    message.fill("no money")
    page.get_by_role("button", name="Send").click()

    alert = page.locator("#refusal")
    expect(alert.get_by_role("link", name="Balance")).to_be_visible()
    expect(message).to_have_value("no money")

    with database.transaction() as connection:
        add_credit(
            connection, poor.id, NANOS_PER_USD, kind="topup", key=poor.name,
            actor="test", reason="test",
        )  # fmt: skip
        set_limit(connection, Limit(account_id=poor.id, requests_per_minute=1))
    database.dispose()
    page.reload()
    for words in ("first", "second"):
        message.fill(words)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(alert).to_contain_text(re.compile(r"Try again in \d+ s"))
    expect(message).to_have_value("second")
