"""Ordinary calls of hot routes skip the framework, and get the same answers as from it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar, Response, post
from litestar.datastructures import State
from litestar.params import JSONBody
from pydantic import BaseModel, ConfigDict

from gateway.accounts.key_uses import KeyUses
from gateway.accounts.rates import RateReservation
from gateway.api.direct import Direct
from gateway.api.http.access import Access
from gateway.api.http.answers import json_response
from gateway.api.http.bodies import EXCEPTION_HANDLERS
from gateway.api.http.guards import require_key
from gateway.api.http.request import ApiRequest
from gateway.errors import NotFound
from gateway.sql.database import Database
from tests.ledger.books import PEPPER, open_books
from tests.stack import Caller, Stack, chat

HELLO = "hello big world"
UNUSUAL = {"unknown": "1"}
"""A query without effect, with which the framework serves a call."""
MADE_PER_CALL = re.compile(rb"(?<=[_\"])[0-9a-f]{32}|(?<=\"created\":)[0-9]+|(?<=_at\":)[0-9]+")

CALLS: Mapping[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", chat("echo", HELLO)),
    "chat of OpenRouter": ("/api/v1/chat/completions", chat("echo", HELLO)),
    "chat as a stream": ("/v1/chat/completions", chat("echo", HELLO, stream=True)),
    "completion": ("/v1/completions", {"model": "echo", "prompt": HELLO}),
    "response": ("/v1/responses", {"model": "echo", "input": HELLO}),
    "response as a stream": ("/v1/responses", {"model": "echo", "input": HELLO, "stream": True}),
    "fallback": ("/v1/chat/completions", chat("nothing", HELLO, models=["echo"])),
    "embedding by a chat model": ("/v1/embeddings", {"model": "echo", "input": HELLO}),
    "unknown model": ("/v1/chat/completions", chat("nothing", HELLO)),
    "unknown field": ("/v1/chat/completions", chat("echo", HELLO, unknown=1)),
    "missing field": ("/v1/chat/completions", {"model": "echo"}),
    "no object": ("/v1/chat/completions", []),
    "U+0000": ("/v1/chat/completions", chat("echo", "a\0b")),
    "too many tokens": ("/v1/chat/completions", chat("echo", HELLO, max_tokens=10**6)),
    "more than the credit": ("/v1/chat/completions", chat("echo", HELLO, n=3)),
    "more than the rate": ("/v1/chat/completions", chat("echo", HELLO * 100, n=4)),
    "no worker": ("/v1/videos", {"model": "Veo3", "prompt": HELLO}),
}


def answered(
    caller: Caller, path: str, body: Any, query: Mapping[str, str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers and body, without what differs between two equal calls."""
    answer = caller.http.post(path, json=body, params=query)
    kept = [
        (name, re.sub(r"[0-9a-f]{32}", "", value))
        for name, value in answer.headers.multi_items()
        if name != "date"
    ]
    return answer.status_code, kept, MADE_PER_CALL.sub(b"", answer.content)


@pytest.mark.parametrize("name", CALLS)
def test_direct_and_framework_answers_are_identical(stack: Stack, name: str) -> None:
    path, body = CALLS[name]
    answers = []
    for query in ({}, UNUSUAL):
        caller = stack.caller(requests_per_minute=100, tokens_per_minute=3000, credit="0.0001")
        caller.http.post("/v1/chat/completions", json={})  # makes the key known
        answers.append(answered(caller, path, body, query))

    direct, framework = answers

    assert direct == framework


# --- Which calls are answered directly ------------------------------------------------------------


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str


@post("/text", status_code=200, opt={"scope": "inference", "holds": True, "direct": True})
async def return_text(request: ApiRequest, data: JSONBody[Text]) -> Response[dict[str, str]]:
    request.caller.taken = RateReservation()
    if data.text == "missing":
        raise NotFound("not_found", "There is no such text.")
    return json_response({"text": data.text, "body": (await request.body()).decode()})


class Served:
    """An application with one direct route, and the number of calls that the framework served."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.by_framework = 0


@pytest.fixture
async def served(database: Database) -> AsyncIterator[Served]:
    books = open_books(database, credit=0)
    access = Access(database, pepper=PEPPER, uses=KeyUses(database))
    await access.key(books.secret, remembered=True)

    def count(*_: object) -> None:
        found.by_framework += 1

    app = Litestar(
        [return_text],
        guards=[count, require_key],
        request_class=ApiRequest,
        request_max_body_size=1000,
        exception_handlers=EXCEPTION_HANDLERS,
        state=State({"services": SimpleNamespace(access=access)}),
        logging_config=None,
        openapi_config=None,
    )

    direct = Direct(app)

    async def in_one_piece(scope: Any, receive: Any, send: Any) -> None:
        """Deliver the body in one message, as uvicorn does and httpx does not."""
        parts = [await receive()]
        while parts[-1]["more_body"]:
            parts.append(await receive())
        whole = {**parts[-1], "body": b"".join(part["body"] for part in parts)}

        async def deliver() -> Any:
            return waiting.pop() if waiting else await receive()

        waiting = [whole]
        await direct(scope, deliver, send)

    transport = httpx.ASGITransport(in_one_piece)
    headers = {"Authorization": f"Bearer {books.secret}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as http:
        found = Served(http)
        yield found
    await database.close()


async def test_ordinary_call_skips_the_framework(served: Served) -> None:
    answer = await served.http.post("/text", json={"text": "a"})

    assert answer.json() == {"text": "a", "body": '{"text":"a"}'}
    assert answer.headers["content-length"] == str(len(answer.content))
    assert served.by_framework == 0


async def test_error_of_a_direct_handler_has_the_usual_body(served: Served) -> None:
    answer = await served.http.post("/text", json={"text": "missing"})

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert served.by_framework == 0


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ({"params": UNUSUAL}, 200),
        ({"headers": {"Origin": "https://example.com"}}, 200),
        ({"headers": {"Authorization": "Bearer tg_unknown"}}, 401),
        ({"headers": {"Authorization": ""}}, 401),
        ({"headers": [("X-One", "1"), ("X-One", "2")]}, 200),
        ({"json": {"text": 1}}, 400),
        ({"json": {"other": 1}}, 400),
        ({"content": b"{"}, 400),
        ({"content": b""}, 400),
        ({"content": b'{"text": "\\u0000"}'}, 400),
        ({"json": {"text": "a" * 1000}}, 413),
    ],
)
async def test_any_other_call_is_passed_on_unread(
    served: Served, call: dict[str, Any], status: int
) -> None:
    given = call if "json" in call or "content" in call else {"json": {"text": "a"}, **call}

    answer = await served.http.post("/text", **given)

    assert answer.status_code == status
    assert served.by_framework == 1
    if status == 200:
        assert answer.json()["body"]
