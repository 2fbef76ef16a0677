"""Pictures in conversations: who reads them, how they travel, what they cost."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.artist import png
from tests.databases import Databases
from tests.gateway.test_kept_inputs import keeping, kept
from tests.stack import Caller, Stack, running
from tests.workers.llm.pictures import make_pictured

PICTURE, OTHER = png(16, 16, 7), png(8, 8, 3)
SOLD = """\
  - name: looker
    task: text-generation
    input: [text, image]
    upstream: {{url: "{url}/v1", model: theirs}}
    limits: {{context_tokens: 8192, output_tokens: 64, sources: 3, source_tokens: 1500}}
    price:
      - {{unit: input_token, amount: "2", per: 1000000}}
      - {{unit: output_token, amount: "8", per: 1000000}}
"""
LOCAL = """\
  - name: local
    task: text-generation
    input: [text, image]
    engine: llm
    checkpoint: {checkpoint}
    options: {{slots: 4, threads: 1}}
    limits: {{context_tokens: 2048, output_tokens: 64, sources: 3, source_tokens: 40}}
    price:
      - {{unit: input_token, amount: "2", per: 1000000}}
      - {{unit: output_token, amount: "8", per: 1000000}}
"""


def data_uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


class Service(http.server.ThreadingHTTPServer):
    """Somebody else's model, which counts 550 tokens for each picture."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Service)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        pictures = json.dumps(body["messages"]).count('"image_url":')
        usage = {"prompt_tokens": 10 + 550 * pictures, "completion_tokens": 2}
        choice = {"index": 0, "delta": {"content": "A cat."}, "finish_reason": "stop"}
        chunks = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join([*lines, "data: [DONE]\n\n"]).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(OTHER if self.path == "/other.png" else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def shared(
    service: Service, tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("pictures")
    checkpoint = make_pictured("qwen2.5vl", directory / "local")
    with running(
        directory / "home",
        Databases("sqlite", directory, postgres).make(),
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=SOLD.format(url=service.url) + LOCAL.format(checkpoint=checkpoint),
    ) as made:
        yield made


@pytest.fixture
def looking(shared: Stack, service: Service) -> Iterator[Caller]:
    service.bodies.clear()
    yield shared.caller()
    shared.close_clients()


def picture(url: str = data_uri(PICTURE)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(caller: Caller, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    message = {"role": "user", "content": list(parts)}
    body = {"model": "looker", "messages": [message], "max_tokens": 8, **fields}
    return caller.http.post("/v1/chat/completions", json=body)


def test_texts_and_pictures_reach_the_model_in_their_order(
    looking: Caller, service: Service
) -> None:
    answer = ask(looking, text("Before:"), picture(), text("After:"), picture(data_uri(OTHER)))

    assert answer.status_code == 200, answer.text
    (body,) = service.bodies
    sent = [
        {"type": "text", "text": "Before:"},
        {"type": "image_url", "image_url": {"url": data_uri(PICTURE)}},
        {"type": "text", "text": "After:"},
        {"type": "image_url", "image_url": {"url": data_uri(OTHER)}},
    ]
    assert body["messages"] == [{"role": "user", "content": sent}]
    assert answer.json()["choices"][0]["message"]["content"] == "A cat."


def test_tokens_of_a_picture_are_those_that_the_upstream_counts(
    looking: Caller, shared: Stack
) -> None:
    quote = looking.http.post(
        "/v1/quote",
        json={
            "model": "looker",
            "input": {
                "messages": [{"role": "user", "content": [picture(), picture()]}],
                "max_tokens": 8,
            },
        },
    )
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key=looking.secret, max_retries=0)
    shared.clients.append(client)

    chunks = list(
        client.chat.completions.create(
            model="looker",
            messages=[{"role": "user", "content": [text("?"), picture(), picture()]}],  # type: ignore[list-item]
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == 10 + 1100
    cost = Decimal(str(usage.cost))  # type: ignore[attr-defined]
    assert cost == (Decimal(2) * usage.prompt_tokens + Decimal(8) * 2) / 1_000_000
    assert quote.status_code == 200, quote.text
    assert Decimal(quote.json()["max_cost"]) >= Decimal(2) * 3000 / 1_000_000


def test_uploads_and_addresses_are_fetched_under_the_rules_of_attachments(
    looking: Caller, service: Service, shared: Stack
) -> None:
    upload = looking.http.post(
        "/v1/uploads", content=PICTURE, headers={"Content-Type": "image/png"}
    )
    assert upload.status_code in (200, 201), upload.text

    stored = ask(looking, picture(upload.json()["id"]))
    private = ask(looking, picture(f"{service.url}/other.png"))
    text_file = ask(looking, picture("data:image/png;base64,aGVsbG8="))

    assert stored.status_code == 200, stored.text
    assert data_uri(PICTURE) in json.dumps(service.bodies[0])
    assert private.status_code == 400
    assert private.json()["error"]["param"] == "messages.0.content.0.image_url.url"
    assert text_file.status_code == 400
    assert len(service.bodies) == 1
    assert shared.held(looking) == 0


def test_pictures_are_bounded_in_number(looking: Caller, service: Service) -> None:
    answer = ask(looking, *[picture()] * 4)

    error = answer.json()["error"]
    assert error["param"] == "messages.0.content.3"
    assert error["message"] == (
        "messages.0.content.3 is picture 4, but looker reads at most 3 in a conversation."
    )
    assert not service.bodies


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_send_pictures(role: str, looking: Caller) -> None:
    body = {"model": "looker", "messages": [{"role": role, "content": [picture()]}]}

    error = looking.http.post("/v1/chat/completions", json=body).json()["error"]

    assert f"is a picture in a message of the role {role}" in error["message"]


def test_model_that_reads_no_pictures_is_named(looking: Caller) -> None:
    answer = ask(looking, text("?"), picture(), model="echo")

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported_content"
    assert error["message"] == "echo reads no images; messages.0.content.1 is of type image_url."


@pytest.mark.parametrize(
    "part", [{"image_url": data_uri(PICTURE)}, {"image_url": data_uri(PICTURE), "detail": "high"}]
)
def test_responses_take_pictures(part: dict[str, Any], looking: Caller, service: Service) -> None:
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", **part}]
    body = {"model": "looker", "input": [{"role": "user", "content": content}]}

    answer = looking.http.post("/v1/responses", json=body)

    assert answer.status_code == 200, answer.text
    sent = service.bodies[0]["messages"][0]["content"]
    assert [one["type"] for one in sent] == ["text", "image_url"]
    assert answer.json()["usage"]["input_tokens"] == 10 + 550


def test_response_for_a_model_that_reads_no_pictures_is_refused(looking: Caller) -> None:
    content = [{"type": "input_image", "image_url": data_uri(PICTURE)}]
    body = {"model": "echo", "input": [{"role": "user", "content": content}]}

    error = looking.http.post("/v1/responses", json=body).json()["error"]

    assert "echo reads no images" in error["message"]


def test_large_picture_is_taken_from_the_body(looking: Caller, service: Service) -> None:
    large = png(1600, 1600, 5) + bytes(300_000)

    answer = ask(looking, picture(data_uri(large)))

    assert answer.status_code == 200, answer.text
    (body,) = service.bodies
    assert body["messages"][0]["content"][0]["image_url"]["url"] == data_uri(large)


def test_kept_input_names_pictures_by_their_place(shared: Stack, service: Service) -> None:
    caller = keeping(shared)

    answer = ask(caller, text("?"), picture())

    found = kept(caller, answer.headers["x-request-id"]).json()["input"]
    content = found["messages"][0]["content"]
    assert content[0] == text("?")
    assert content[1]["image_url"]["url"] == {"attachment": 0}
    assert data_uri(PICTURE) not in json.dumps(found)


def test_models_that_read_pictures_say_so(looking: Caller) -> None:
    listed = {one["id"]: one for one in looking.http.get("/v1/models").json()["data"]}

    assert listed["looker"]["architecture"]["input_modalities"] == ["text", "image"]
    assert listed["echo"]["architecture"]["input_modalities"] == ["text"]


def test_a_model_that_runs_here_reads_pictures_and_charges_their_tokens(
    looking: Caller, shared: Stack
) -> None:
    def tokens(*parts: dict[str, Any]) -> int:
        answer = ask(looking, *parts, model="local", temperature=0)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        path = f"/v1/requests/{answer.headers['x-request-id']}/receipt"
        receipt = looking.http.get(path).json()
        lines = {line["unit"]: line for line in receipt["lines"]}
        assert int(lines["input_token"]["quantity"]) == usage["prompt_tokens"]
        expected = Decimal(2) * usage["prompt_tokens"] + Decimal(8) * usage["completion_tokens"]
        assert Decimal(receipt["cost"]) == expected / 1_000_000
        count: int = usage["prompt_tokens"]
        return count

    # 16 x 16 pixels are four tokens, 8 x 8 are scaled up to the same; two marks around each.
    alone = tokens(text("?"))
    assert tokens(text("?"), picture()) == alone + 6
    assert tokens(text("?"), picture(), picture(data_uri(OTHER))) == alone + 12
    assert shared.held(looking) == 0


def test_a_picture_that_cannot_be_decoded_costs_nothing(looking: Caller, shared: Stack) -> None:
    before = looking.http.get("/v1/balance").json()

    answer = ask(looking, text("?"), picture(), picture(data_uri(PICTURE[:41])), model="local")

    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == "messages"
    assert error["message"].startswith("Picture 2 of the conversation: ")
    assert looking.http.get("/v1/balance").json() == before
    assert shared.held(looking) == 0
