"""Every task of the playground from its form to its receipt, again as a new order, and as code."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from gateway.accounts.keys import create_key
from gateway.sql.database import Database
from tests.artist import png
from tests.console.browser.conftest import Enter, Site
from tests.console.browser.inspection import TWO_VIEWS, Watched
from tests.console.browser.playing import kept_inputs
from tests.console.browser.test_playground import DURATION, PLAY, PORTRAIT, READY
from tests.stack import PEPPER
from tests.workers.transcription.checkpoints import sound, wav
from workers.media import encode

LANGUAGES = {
    "curl": ["bash", "-c"],
    "Python": [sys.executable, "-c"],
    **(
        {"JavaScript": [node, "--input-type=module", "-e"]}
        if (node := shutil.which("node"))
        else {}
    ),
}
FILE = re.compile(r'data_uri\("[^"]*"\)')
OUTPUTS = {
    "answer": "content",
    "text": "text",
    "vectors": "vectors",
    "scores": "scores",
    "transcript": "segments",
    "image": "image/png",
    "audio": "audio/",
    "video": "video/mp4",
}
"""What the output contains as JSON, by what a task makes."""


@dataclass(frozen=True)
class Case:
    """A form with what is entered, and what it makes."""

    query: str
    makes: str
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    count: int = 1


CASES = {
    "chat": Case(
        "model=pocket-chat&max_tokens=8&temperature=0.25&seed=3&system=Be+brief.\nReally.",
        "answer",
        {"Message": "What is a hold?\nAnd a charge?"},
    ),
    "chat about a picture": Case(
        "model=local&max_tokens=4",
        "answer",
        {"Message": "What is it?"},
        {"Pictures": ("one.png", "two.png")},
    ),
    "completion": Case(
        "model=pocket-chat&task=text-completion&max_tokens=8&n=2&logprobs=2&stop=END",
        "text",
        {"Prompt": "A hold is\n a "},
        count=2,
    ),
    "embedding": Case(
        "model=pocket-embed", "vectors", {"Texts, one a line": "a red circle\na blue square"}
    ),
    "ranking": Case(
        "model=ranker&top_n=2",
        "scores",
        {"Query": "who jumps", "Documents, one a line": "the fox jumps\na lazy dog\nnothing"},
    ),
    "image": Case(
        "model=pocket-image&steps=4&n=2&seed=5&guidance=1.5",
        "image",
        {"Prompt": "a red circle"},
        count=2,
    ),
    "control": Case(
        "model=painter&control_strength=0.75",
        "image",
        {"Prompt": "a red circle"},
        {"Control picture": ("one.png",)},
    ),
    "vary": Case(
        "model=pocket-image&task=image-to-image&steps=2&strength=0.5",
        "image",
        {"Prompt": "a blue circle"},
        {"Picture": ("one.png",)},
    ),
    "edit": Case(
        "model=pocket-image&task=image-edit",
        "image",
        {"Prompt": 'make it\'s circle "blue"'},
        {"Picture": ("one.png",), "Mask": ("mask.png",)},
    ),
    "blend": Case(
        "model=pocket-image&task=image-blend",
        "image",
        {"Prompt": "a circle above a square"},
        {"Pictures": ("one.png", "two.png")},
    ),
    "relight": Case(
        "model=pocket-image&task=image-relight",
        "image",
        {"Prompt": "dark"},
        {"Picture": ("one.png",)},
    ),
    "restyle": Case(
        "model=pocket-image&task=image-restyle",
        "image",
        {"Prompt": "outlined"},
        {"Picture": ("one.png",)},
    ),
    "enlarge": Case("model=pocket-upscale&scale=2", "image", {}, {"Picture": ("one.png",)}),
    "video": Case(
        "model=pocket-video&seconds=0.5&seed=1", "video", {"Prompt": "a red star moves left"}
    ),
    "video of a picture": Case(
        "model=pocket-video&task=image-to-video&seconds=0.5",
        "video",
        {"Prompt": "the circle falls"},
        {"Picture": ("one.png",)},
    ),
    "enlarge a video": Case(
        "model=pocket-video-upscale&scale=2", "video", {}, {"Video": ("clip.mp4",)}
    ),
    "talking head": Case(
        "model=pocket-talking", "video", {}, {"Picture": ("face.png",), "Audio": ("talk.wav",)}
    ),
    "workflow": Case("model=head", "video", {"Text": "Good day."}, {"Picture": ("face.png",)}),
    "speech": Case("model=pocket-speech&voice=ada&speed=1.25", "audio", {"Text": "Good\nday."}),
    "speech by a voice": Case(
        "model=pocket-speech&task=voice-clone",
        "audio",
        {"Text": "Good day."},
        {"Recording": ("talk.wav",)},
    ),
    "music": Case(
        "model=pocket-music&seconds=4&key=D+major&tempo=90&mood=calm",
        "audio",
        {"Prompt": "a waltz with piano"},
    ),
    "transcript": Case("model=scribe&timestamps=word", "transcript", {}, {"Audio": ("talk.wav",)}),
}


@pytest.fixture(scope="module")
def site(playground: Site) -> Iterator[Site]:
    with kept_inputs(playground):
        yield playground


@pytest.fixture(scope="module")
def secret(site: Site) -> str:
    """A key of the account, for what is run as code."""
    database = Database(site.database_url)
    with database.transaction() as connection:
        made, _ = create_key(
            connection, site.seeded.accounts["atlas"].id, pepper=PEPPER.encode(), name="code"
        )
    database.dispose()
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that forms are filled with, in the working directory of the code."""
    folder = tmp_path_factory.mktemp("files")
    frames = [np.full((32, 32, 3), 40 * place, np.uint8) for place in range(4)]
    for name, data in {
        "one.png": png(64, 64, 7),
        "two.png": png(64, 64, 99),
        "mask.png": png(64, 64, 255),
        "face.png": PORTRAIT.read_bytes(),
        "talk.wav": wav(sound(2.0)),
        "clip.mp4": encode.video(frames, 8, "mp4"),
    }.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def api(site: Site, secret: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=site.url, headers=headers, timeout=30) as client:
        yield client


class Recorder(ThreadingHTTPServer):
    """Passes calls on to a gateway, and keeps their bodies."""

    def __init__(self, gateway: str) -> None:
        super().__init__(("127.0.0.1", 0), _Recording)
        self.gateway = gateway
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[Any] = []


class _Recording(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(sent))
        self._pass_on(sent)

    def do_GET(self) -> None:
        self._pass_on(None)

    def _pass_on(self, sent: bytes | None) -> None:
        headers = {
            name: self.headers[name]
            for name in ("Authorization", "Content-Type")
            if name in self.headers
        }
        url = self.server.gateway + self.path
        answer = httpx.request(self.command, url, content=sent, headers=headers, timeout=60)
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers["content-type"])
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def recorder(site: Site) -> Iterator[Recorder]:
    with Recorder(site.url) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


TWINS = ("restyle", "blend", "vary", "enlarge", "video of a picture", "speech")
"""Cases whose forms and answers are like those of another one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in TWINS else ()) for name in CASES]
)
def test_task_from_its_form_to_its_receipt_and_again(
    name: str, enter: Enter, api: httpx.Client, secret: str, files: Path, recorder: Recorder
) -> None:
    case = CASES[name]
    page = enter("member")
    watched = Watched(page)
    watched.visit(f"{PLAY}?{case.query}".replace("\n", "%0A"))

    _fill(page, case, files)
    code = _code(page)
    _check_price(page, code["curl"], files, secret)
    page.locator("#order").click()
    cost = _charged(page)
    _check_made(page, case)
    assert watched.inspect_views(TWO_VIEWS) == []

    page.locator("#made").get_by_role("link", name="receipt").first.click()
    page.wait_for_url("**/console/requests/req_*")
    request_id = page.url.rpartition("/")[2]
    receipt = api.get(f"/v1/requests/{request_id}").json()
    assert cost == f"${receipt['cost']}"
    page.get_by_role("link", name="Try again").click()
    page.wait_for_url("**again=req_*")
    again = _code(page)
    assert _sent(again["Python"]) == _sent(code["Python"])
    expect(page.locator("main")).not_to_contain_text("Not carried over")

    posted = _posted(api, request_id)
    first = api.get(f"/v1/models/{posted[0]}").json()["task"]
    assert not any(secret in text or "tg_" in text for text in code.values())
    for language, command in LANGUAGES.items():
        recorder.bodies.clear()
        copied = code[language].replace(recorder.gateway, recorder.url)
        done = _output([*command, copied], files, secret)
        assert OUTPUTS[case.makes] in done, f"{language}: {done}"
        (body,) = recorder.bodies
        assert _ordered(body, first) == posted, language


def _ordered(body: Mapping[str, Any], first: str) -> Any:
    """Return what a body orders, with the contents of its files. ``first``: the model's first task,
    which need not be named."""
    sent = body.get("input") or {name: each for name, each in body.items() if name != "model"}
    found = _with_contents(sent, [])
    if isinstance(each := found.get("timestamps"), str):
        found["timestamps"] = [each]  # As the gateway keeps it.
    return body["model"], body.get("task", first), found


def _posted(api: httpx.Client, request_id: str) -> Any:
    """Return what the form ordered, as the gateway kept it, with the contents of its files."""
    kept = api.get(f"/v1/requests/{request_id}/input").json()
    files = [httpx.get(each["url"]).content for each in kept["attachments"]]
    sent = _with_contents(kept["input"], files)
    # Only a form watches how a picture is made; previews are free.
    sent.pop("previews", None)
    return kept["model"], kept["task"], sent


def _with_contents(value: Any, files: Sequence[bytes]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"attachment"}:
            return files[value["attachment"]]
        return {name: _with_contents(one, files) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_contents(one, files) for one in value]
    if isinstance(value, str) and value.startswith("data:;base64,"):
        return base64.b64decode(value.partition(",")[2])
    return value


def _fill(page: Page, case: Case, files: Path) -> None:
    for label, names in case.files.items():
        page.get_by_label(label, exact=True).or_(
            page.get_by_label(f"{label} required", exact=True)
        ).set_input_files([files / each for each in names])
    for label, text in case.texts.items():
        page.get_by_label(label, exact=True).or_(
            page.get_by_label(f"{label} required", exact=True)
        ).fill(text)
    if (consent := page.get_by_label("This is my voice")).count():
        consent.check()


def _code(page: Page) -> dict[str, str]:
    """Return the form's call, once its price is known."""
    # The price and the code come together, a moment after the last change.
    expect(page.locator('#price[aria-busy="false"]')).to_contain_text("$")
    return {
        each: page.locator(f'[data-code="{each}"]').text_content() or ""
        for each in ("curl", "Python", "JavaScript")
    }


def _sent(code: str) -> Any:
    """Return the body that code in Python sends, without the names of its files."""
    tree = ast.parse(FILE.sub("'FILE'", code))
    (body,) = [
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.keyword) and each.arg == "json"
    ]
    return ast.literal_eval(body)


def _check_price(page: Page, curl: str, files: Path, secret: str) -> None:
    """Compare the price that is shown with that of the API for the same body."""
    order = re.sub(r"^id=\$\(", "", curl).partition(" \\\n  | sed")[0]
    asked = re.sub(r"(http://[^/]+)/v1/\S+", r"\1/v1/quote", order, count=1)
    quoted = json.loads(_output(["bash", "-c", asked], files, secret, errors=False))
    assert page.locator("#price b").inner_text() == f"${quoted['max_cost']}", quoted


def _charged(page: Page) -> str:
    found = page.locator("#made .charged").last
    expect(found).to_have_text(re.compile(r"^\$"), timeout=60_000)
    # Whatever failed says why before that.
    expect(page.locator("#made article > .hint").last).to_have_text(re.compile("^Charged"))
    return found.inner_text()


def _check_made(page: Page, case: Case) -> None:
    made = page.locator("#made article").last
    if case.makes == "image":
        pictures = made.locator("figure[data-kind=image] img")
        expect(pictures).to_have_count(case.count)
        wide = "(all) => Promise.all(all.map((one) => one.decode().then(() => one.naturalWidth)))"
        assert all(width >= 32 for width in pictures.evaluate_all(wide))
    elif case.makes == "video":
        video = made.locator("video")
        assert video.evaluate(READY) > 0
        assert video.evaluate("(each) => each.readyState") >= 2
        assert video.get_attribute("poster")
    elif case.makes == "audio":
        assert made.locator(".media audio").evaluate(DURATION) > 0
    elif case.makes in ("answer", "text"):
        expect(made.locator(".answered")).to_have_count(case.count)
    else:
        expect(made.locator("pre.output")).not_to_be_empty()


def _output(command: list[str], files: Path, secret: str, *, errors: bool = True) -> str:
    environment = {**os.environ, "TOLLGATE_API_KEY": secret, "NO_PROXY": "*"}
    done = subprocess.run(
        command,
        cwd=files,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + (done.stderr if errors else "")
