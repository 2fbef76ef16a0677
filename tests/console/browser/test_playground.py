"""The playground in a real browser, with models that answer."""

from __future__ import annotations

import itertools
import json
import math
import re
import uuid
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from gateway.accounts.accounts import create_account
from gateway.accounts.limits import Limit, set_limit
from gateway.audit_log import Author
from gateway.ledger.transfers import add_credit
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import Database
from tests.artist import png
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import Walker, Watched
from tests.console.browser.playing import kept_inputs
from tests.console.payloads import PAYLOADS
from tests.console.seeding import HOSTILE
from tests.gateway.test_pictures import Service, data_uri
from tests.stack import PEPPER

PORTRAIT = Path(__file__).parents[3] / "docs" / "img" / "portrait.png"
PLAY = "/console/playground"


@pytest.fixture(scope="module")
def site(playground: Site) -> Site:
    return playground


@pytest.fixture
def keeping(site: Site) -> Iterator[None]:
    with kept_inputs(site):
        yield


def charged(page: Page) -> str:
    """Wait for the end of the newest order; return its cost, as the page shows it."""
    found = page.locator("#made .charged").last
    expect(found).to_have_text(re.compile(r"^\$"), timeout=30_000)
    return found.inner_text()


def reload_until(page: Page, wanted: Locator) -> None:
    """Load a page without scripts again until it shows something."""
    for _ in range(100):
        if wanted.count():
            return
        page.wait_for_timeout(500)
        page.reload()


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


MARKUP = """\
# {long}

| {long} | {long} | {long} |
| --- | --- | --- |
| {evil} | `{long}` | {long} |

- {long}
- [x](javascript:alert(1)) [y](https://evil.example/{long}) ![z](https://evil.example/z.png)

> {evil}

```html
{long} {evil}
```

{evil}
{long}
"""


def test_answer_full_of_markup_is_text_within_the_window(site: Site, enter: Enter) -> None:
    text = MARKUP.format(long="w" * 300, evil=" ".join(PAYLOADS))
    page = enter("member", viewport={"width": 390, "height": 844})
    walker = Walker(page, site.url)
    walker.visit(f"{PLAY}?model=echo")

    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()
    charged(page)

    raw, shown = page.locator("#made .answered").first, page.locator("#made .formatted").first
    for payload in PAYLOADS:
        expect(raw).to_contain_text(payload)
    assert shown.locator("script, img, svg, iframe, form, [onerror], [onload]").count() == 0
    addresses = shown.locator("a").evaluate_all("(all) => all.map((each) => each.protocol)")
    assert set(addresses) == {"https:"}
    assert walker.inspect() == []
    page.get_by_role("button", name="As text").first.click()
    expect(raw).to_be_visible()
    assert walker.inspect() == []


def test_call_full_of_markup_is_text(site: Site, enter: Enter) -> None:
    """The call itself is put into the page's stream: no small model calls reliably."""
    evil = "w" * 300 + " ".join(PAYLOADS)
    page = enter("member", viewport={"width": 390, "height": 844})
    walker = Walker(page, site.url)
    calls = [{"id": evil, "name": evil, "arguments": json.dumps({evil: evil})}]
    ended = {"status": "succeeded", "cost": "$0.1", "took": "1 s", "speed": evil, "unknown": [evil]}
    ended |= {"tokens": [], "phases": [], "held": "$1", "released": "$0.9"}
    stream = [
        ("accepted", {"path": "/x", "most": "", "held": "$1"}),
        ("text", {"text": evil, "calls": calls}),
        ("ended", ended),
    ]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in stream)
    walker.visit(f"{PLAY}?model=echo")
    page.route(f"**{PLAY}/order", lambda route: route.fulfill(body=body), times=1)

    page.get_by_label("Message").fill("x")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .call")).to_contain_text(PAYLOADS[0])

    assert page.locator("#made [onerror], #made [onload], #made script").count() == 0
    assert walker.inspect() == []


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


def seen(service: Service) -> list[str]:
    """Return the pictures that the model was last sent, in their order."""
    messages = service.bodies[-1]["messages"]
    parts = [
        part for each in messages if isinstance(each["content"], list) for part in each["content"]
    ]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


@pytest.mark.usefixtures("keeping")
def test_pictures_are_sent_with_a_message_and_again_with_the_next(
    site: Site, enter: Enter, looking: Service
) -> None:
    one, two = png(16, 16, 7), png(8, 8, 3)
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


def test_model_that_reads_no_pictures_says_so(site: Site, enter: Enter, looking: Service) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=echo")
    expect(page.locator("#play")).to_contain_text("echo reads no pictures; looker, local do.")

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


FRAMES_PER_SECOND = 50
"""The page's own work for a frame leaves room for so many, if the processor is free."""
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

    page.get_by_label("Message").fill("one two three four five six seven eight " * 5)
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
    assert watched.inspect_views() == []
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


def test_ten_thousand_tokens_stay_fluent(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=novel")
    performance = page.context.new_cdp_session(page)
    performance.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_s() -> float:
        """Return the processor's time of the page's main thread, whatever else runs."""
        metrics = performance.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    text = " ".join(
        f"w{number % 97}" + "\n" * (number % 40 == 39) for number in range(10_000)
    ).strip()
    frames = """() => { window.frames_seen = 0; const count = () => {
      window.frames_seen += 1; requestAnimationFrame(count); }; count(); }"""

    page.get_by_label("Message").fill(text)
    page.evaluate(TICKS)
    page.evaluate(frames)
    before_s = busy_s()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#made .charged")).to_have_count(1, timeout=120_000)
    frame_s = (busy_s() - before_s) / page.evaluate("() => window.frames_seen")

    answered = page.locator("#made [data-role=assistant] .answered").text_content()
    assert answered == text
    assert frame_s < 1 / FRAMES_PER_SECOND
    ticks = [
        (Decimal(each[1]), Decimal(each[2]))
        for tick in page.evaluate("() => window.ticks")
        if (each := re.match(r"\$([\d.]+) so far of at most \$([\d.]+)", tick))
    ]
    costs = [cost for cost, _ in ticks]
    final = Decimal(page.locator("#made .charged").inner_text().removeprefix("$"))
    assert costs == sorted(costs)
    assert costs[-1] <= final <= min(most for _, most in ticks)
    open_receipt(page)
    expect(page.locator("main")).to_contain_text(f"{final}")


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
    assert watched.inspect_views() == []
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
    assert watched.inspect_views() == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Edit this").click()
    page.wait_for_url("**from-image=req_*")
    expect(page.locator(".stage")).to_be_visible()
    page.get_by_role("button", name="Order").click()
    assert charged(page) == "$0.0004"
    page.get_by_role("button", name="Before and after").click()
    expect(page.get_by_role("dialog").locator("img")).to_have_count(2)
    assert watched.inspect_views() == []


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


def test_recording_is_not_imitated_without_consent(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-speech&task=voice-clone")
    page.get_by_label("Text").first.fill("Good morning.")
    order = page.get_by_role("button", name="Order")
    expect(order).to_be_enabled()

    page.get_by_label("Recording").set_input_files(
        files={"name": "talk.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}
    )

    expect(order).to_be_disabled()
    order.evaluate("(each) => (each.disabled = false)")
    with page.expect_response(f"**{PLAY}/order") as answered:
        order.click()
    assert answered.value.status == 400
    expect(page.locator("#refusal")).to_contain_text("consent")
    expect(page.get_by_label("Text").first).to_have_value("Good morning.")


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


INKED = """\
(all) => all.map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, at) => at % 4 === 3 && value > 0).length / (data.length / 4);
})
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
    page.wait_for_function("() => window.played.length > 0")
    played = page.evaluate("() => window.played")
    assert [(name, PLAY in address) for name, address in played][:1] == [("playing", True)]
    if model == "pocket-music":
        expect(page.get_by_role("img", name=re.compile(r"^\d+ notes$"))).to_be_visible()
    assert watched.inspect() == []

    open_receipt(page)
    page.locator("#made").scroll_into_view_if_needed()
    expect(page.get_by_role("img", name=re.compile(r"^Waveform, \d+\.\d s$"))).to_be_visible()
    assert page.locator("#made .media audio").evaluate(DURATION) > 0
    if model == "pocket-music":
        expect(page.get_by_role("img", name=re.compile(r"^\d+ notes$"))).to_be_visible()
    inked = page.locator("#made canvas").evaluate_all(INKED)
    assert all(share > 0.005 for share in inked), inked
    assert watched.inspect_views() == []


def test_sound_that_is_made_while_its_request_is_open_is_drawn(site: Site, enter: Enter) -> None:
    page = enter("member", java_script_enabled=False)
    page.goto(f"{PLAY}?model=pocket-music")
    page.get_by_label("Prompt").first.fill("a calm waltz")
    page.get_by_role("button", name="Order").click()
    page.wait_for_url("**/console/requests/req_*")
    browser = page.context.browser
    assert browser is not None
    context = browser.new_context(base_url=site.url, storage_state=page.context.storage_state())

    followed = context.new_page()
    followed.goto(page.url)
    made = followed.locator("#made")
    made.wait_for(timeout=60_000)
    made.scroll_into_view_if_needed()

    waveform = made.get_by_role("img", name=re.compile(r"^Waveform, \d+\.\d s$"))
    expect(waveform).to_be_visible(timeout=30_000)
    context.close()


def test_sample_of_a_voice_costs_what_its_button_says(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-speech&voice=ada")

    page.get_by_role("button", name="Hear this voice ($0.000034)").click()

    expect(page.get_by_label("Sample of ada, charged $0.000034")).to_be_visible()


READY = """\
(each) => each.readyState >= 2 ? each.duration
  : new Promise((known) => each.addEventListener("loadeddata", () => known(each.duration)))
"""


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
    reload_until(page, page.locator("#made", has_text="one two"))

    page.goto(f"{PLAY}?model=pocket-image")
    page.get_by_label("Prompt").first.fill("a red circle")
    page.get_by_role("button", name="Order").click()
    page.wait_for_url("**/console/requests/req_*")
    picture = page.locator("#made img")
    reload_until(page, picture)
    expect(picture).to_have_js_property("naturalWidth", 64)


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


def test_focus_stays_where_something_was_done(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=echo")
    message = page.get_by_label("Message", exact=False)
    message.fill("one")
    page.get_by_role("button", name="Send").press("Enter")
    expect(page.locator("#made .charged")).to_have_count(1)
    expect(message).to_be_focused()

    page.get_by_role("button", name="Answer again").press("Enter")
    expect(page.locator("#made .acts").last).to_contain_text("2 of 2")
    expect(message).to_be_focused()
    page.get_by_role("button", name="Previous branch").press("Enter")
    expect(page.locator("#made .acts").last).to_contain_text("1 of 2")
    expect(page.get_by_role("button", name="Previous branch")).to_be_focused()
    page.get_by_role("button", name="Delete").first.press("Enter")
    expect(page.locator("#made article")).to_have_count(1)
    expect(page.get_by_role("button", name="Delete")).to_be_focused()

    page.goto(f"{PLAY}?model=pocket-image")
    order = page.get_by_role("button", name="Order")
    order.press("Enter")
    charged(page)
    expect(order).to_be_focused()


def test_pictures_are_shown_while_they_are_made(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-image&steps=4&n=2")
    page.evaluate(
        """() => {
          window.previews = new Set();
          new MutationObserver(() => {
            for (const each of document.querySelectorAll("#made .previews img")) {
              window.previews.add(`${each.dataset.output} ${each.src.slice(0, 11)}`);
            }
          }).observe(document.getElementById("made"), { subtree: true, childList: true });
        }"""
    )

    page.get_by_role("button", name="Order").click()
    charged(page)

    assert set(page.evaluate("[...window.previews]")) == {"0 data:image/", "1 data:image/"}
    assert page.locator("#made .previews").count() == 0
    page.get_by_role("button", name="Use this seed").first.click()
    expect(page.locator("#field-seed")).to_be_focused()


def test_video_is_made_again_with_other_words(site: Site, enter: Enter) -> None:
    page = enter("member")
    page.goto(f"{PLAY}?model=pocket-video&seconds=0.5")
    page.get_by_label("Prompt").first.fill("a red star moves left")
    page.get_by_role("button", name="Order").click()
    charged(page)

    page.get_by_role("button", name="Remix").click()

    expect(page.locator("#field-seed")).not_to_have_value("")
    expect(page.locator("#field-prompt")).to_be_focused()


def test_request_of_a_video_shows_its_first_picture_before_it_plays(
    site: Site, enter: Enter
) -> None:
    page = enter("member")
    watched = Watched(page)
    page.goto(f"{PLAY}?model=pocket-video&seconds=0.5")
    page.get_by_label("Prompt").first.fill("a red star moves left")
    page.get_by_role("button", name="Order").click()
    charged(page)

    open_receipt(page)

    figure = page.locator("#made figure")
    expect(figure).to_have_count(1)
    video = figure.locator("video")
    poster = page.request.get(video.get_attribute("poster") or "")
    assert (poster.status, poster.headers["content-type"].partition("/")[0]) == (200, "image")
    assert video.evaluate(READY) > 0
    for label in ("first picture", "sheet of frames"):
        link = figure.get_by_role("link", name=label)
        answer = page.request.get(link.get_attribute("href") or "")
        assert answer.headers["content-type"].startswith("image/")
    assert watched.inspect_views() == []
