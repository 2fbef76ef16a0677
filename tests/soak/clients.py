"""Live traffic of all modalities; each client records ids, costs and tokens received.

Clients behave as honest ones do: they retry what was not accepted, repeat what was lost under its
own name, and read every answer. Some leave in the middle; some send what nobody should.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import httpx
from PIL import Image

from tests.soak.ground import Account, Ground

PATIENCE_S: Final = 100.0
"""Longer than any deadline of the installation."""
ENDED: Final = ("succeeded", "failed", "cancelled", "expired")
WORDS: Final = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota")


@dataclass
class Act:
    """One thing that a client wanted, and what came of it."""

    kind: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str | None = None
    """Its Idempotency-Key: it may be sent often and must run once."""
    posts: int = 0
    """Times that it was sent without the answer that it was not accepted."""
    told: dict[str, str | None] = field(default_factory=dict)
    """Ids of its accepted requests, with their costs as far as they were received."""
    words: int = 0
    """Tokens of a stream that arrived."""
    pictures: int = 0
    """Previews at full size that arrived."""
    result: str = "lost"


@dataclass
class Client:
    ground: Ground
    account: Account
    chance: random.Random
    http: httpx.AsyncClient
    webhook: str
    acts: list[Act] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def begin(self, kind: str, *, named: bool = False) -> Act:
        act = Act(kind)
        act.key = act.name if named else None
        self.acts.append(act)
        return act

    @property
    def url(self) -> str:
        return self.ground.url(self.chance)

    def headers(self, act: Act) -> dict[str, str]:
        own = {"Idempotency-Key": act.key} if act.key else {}
        return {"Authorization": f"Bearer {self.account.secret}", **own}

    def text(self, most: int = 30) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randint(1, most)))

    def check(self, act: Act, answer: httpx.Response) -> None:
        """An answer is an answer or an honest refusal; never a failure of ours."""
        if answer.status_code in (500, 502, 504):
            self.violations.append(f"{act.kind}: {answer.status_code} {answer.text[:300]}")

    async def send(self, act: Act, method: str, path: str, **content: Any) -> httpx.Response | None:
        """Send until it is accepted or refused for good; None if its answer was lost."""
        content.setdefault("headers", self.headers(act))
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            counted = method == "POST"
            act.posts += counted
            try:
                answer = await self.http.request(method, self.url + path, **content)
            except httpx.ConnectError:
                act.posts -= counted
            except httpx.HTTPError:
                if act.key is None and method == "POST":
                    return None
            else:
                self.check(act, answer)
                if answer.status_code not in (429, 503):
                    if answer.status_code >= 400 and answer.status_code != 424:
                        act.posts -= counted
                    return answer
                act.posts -= counted
            await asyncio.sleep(self.chance.uniform(0.2, 1.5))
        return None

    def hear(self, act: Act, answer: httpx.Response) -> None:
        """Note the request and its cost as an answer's head has them."""
        request_id = answer.headers.get("x-request-id")
        if request_id is not None:
            act.told[request_id] = answer.headers.get("x-request-cost")
        act.result = str(answer.status_code)


Behaviour: TypeAlias = Callable[[Client], Awaitable[None]]


# --- Text ----------------------------------------------------------------------------------------


async def chat_whole(client: Client) -> None:
    act = client.begin("chat", named=client.chance.random() < 0.5)
    model = client.chance.choice(["echo", "echo", "slow", "pocket-chat"])
    body = _chat(model, client.text(), act)
    answer = await client.send(act, "POST", "/v1/chat/completions", json=body)
    if answer is not None:
        client.hear(act, answer)


async def chat_streamed(client: Client) -> None:
    """Read to the end, or leave in the middle."""
    act = client.begin("chat stream")
    body = _chat(client.chance.choice(["echo", "slow", "pocket-chat"]), client.text(60), act)
    body["stream"] = True
    leaves_after = client.chance.choice([None, None, 1, 5, 20])
    act.posts += 1
    with contextlib.suppress(httpx.HTTPError):
        async with client.http.stream(
            "POST", client.url + "/v1/chat/completions", json=body, headers=client.headers(act)
        ) as answer:
            if not answer.is_success:
                await answer.aread()
                client.check(act, answer)
                act.posts -= 1
                act.result = str(answer.status_code)
                return
            client.hear(act, answer)
            act.result = "left"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    act.result = "read"
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk.get("choices", ()):
                    act.words += len((choice["delta"].get("content") or "").split())
                if "error" in chunk:
                    act.result = f"error {chunk['error']['code']}"
                if leaves_after is not None and act.words >= leaves_after:
                    return


async def completion(client: Client) -> None:
    act = client.begin("completion", named=True)
    body = {"model": "pocket-chat", "prompt": client.text(), "max_tokens": 16}
    answer = await client.send(act, "POST", "/v1/completions", json=body)
    if answer is not None:
        client.hear(act, answer)


async def response(client: Client) -> None:
    act = client.begin("response", named=True)
    body = {"model": "echo", "input": client.text(), "metadata": {"act": act.name}}
    answer = await client.send(act, "POST", "/v1/responses", json=body)
    if answer is not None:
        client.hear(act, answer)


async def embedding(client: Client) -> None:
    act = client.begin("embedding")
    body = {"model": "pocket-embed", "input": [client.text(), client.text()]}
    answer = await client.send(act, "POST", "/v1/embeddings", json=body)
    if answer is not None:
        client.hear(act, answer)


# --- Images, audio, video ------------------------------------------------------------------------


async def picture(client: Client) -> None:
    act = client.begin("picture", named=client.chance.random() < 0.5)
    body = {
        "model": "pocket-image-turbo",
        "prompt": "a red circle",
        "n": client.chance.randint(1, 2),
    }
    answer = await client.send(act, "POST", "/v1/images/generations", json=body)
    if answer is not None:
        client.hear(act, answer)


async def picture_previewed(client: Client) -> None:
    """Receive a preview at full size and disconnect, or wait for the image."""
    act = client.begin("picture stream")
    body = {"model": "pocket-image", "prompt": "a red circle", "stream": True, "partial_images": 2}
    leaves = client.chance.random() < 0.6
    act.posts += 1
    with contextlib.suppress(httpx.HTTPError):
        async with client.http.stream(
            "POST", client.url + "/v1/images/generations", json=body, headers=client.headers(act)
        ) as answer:
            if not answer.is_success:
                await answer.aread()
                client.check(act, answer)
                act.posts -= 1
                act.result = str(answer.status_code)
                return
            client.hear(act, answer)
            act.result = "read"
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and "partial_image" in line:
                    act.pictures += 1
                    if leaves and act.pictures == 2:
                        act.result = "left"
                        return


async def edit(client: Client) -> None:
    act = client.begin("edit", named=True)
    answer = await client.send(
        act,
        "POST",
        "/v1/images/edits",
        data={"model": "pocket-image", "prompt": "make the circle yellow"},
        files={"image": ("a.png", _png(), "image/png")},
    )
    if answer is not None:
        client.hear(act, answer)


async def speech(client: Client) -> None:
    act = client.begin("speech")
    body = {"model": "pocket-speech", "voice": "ada", "input": client.text(8) + "."}
    answer = await client.send(act, "POST", "/v1/audio/speech", json=body)
    if answer is not None:
        client.hear(act, answer)


async def native(client: Client) -> None:
    """Order, poll to the end, and read the cost that the view tells."""
    kind, model, given = client.chance.choice(
        [
            ("music", "pocket-music", {"prompt": "a calm tune", "seconds": 2}),
            ("upscale", "pocket-upscale", {"image": _data(_png()), "scale": 2}),
            ("film", "pocket-video", {"prompt": "a red circle moves left", "seconds": 1}),
            ("talking head", "pocket-talking-head", {"text": "Hello.", "image": _portrait()}),
            ("upstream", "Veo3", {"prompt": "a fox"}),
            ("text", "slow", _messages(client.text())),
            ("text", "echo", _messages(client.text())),
        ]
    )
    act = client.begin(kind, named=True)
    body = {"model": model, "input": given, "metadata": {"act": act.name}}
    if client.chance.random() < 0.4:
        body["webhook"] = client.webhook
    answer = await client.send(act, "POST", "/v1/requests", json=body)
    if answer is None or answer.status_code != 202:
        act.result = "lost" if answer is None else str(answer.status_code)
        return
    client.hear(act, answer)
    request_id = answer.json()["id"]
    if client.chance.random() < 0.15:
        await client.send(act, "POST", f"/v1/requests/{request_id}/cancel")
        act.posts = 1
    await _follow(client, act, request_id)


async def _follow(client: Client, act: Act, request_id: str) -> None:
    deadline = asyncio.get_running_loop().time() + 2 * PATIENCE_S
    while asyncio.get_running_loop().time() < deadline:
        answer = await client.send(act, "GET", f"/v1/requests/{request_id}")
        if answer is not None and answer.is_success and answer.json()["status"] in ENDED:
            act.told[request_id] = answer.json()["cost"]
            act.result = answer.json()["status"]
            return
        if answer is not None and answer.status_code == 404:
            client.violations.append(f"{act.kind}: {request_id} was accepted and is gone")
            return
        await asyncio.sleep(client.chance.uniform(0.3, 1.0))
    client.violations.append(f"{act.kind}: {request_id} did not end in {2 * PATIENCE_S:.0f} s")


async def batch(client: Client) -> None:
    act = client.begin("batch", named=True)
    count = client.chance.randint(2, 6)
    lines = [
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": _chat("echo", client.text(), act),
            }
        )
        for number in range(count)
    ]
    headers = {"Authorization": f"Bearer {client.account.secret}"}
    file = await client.send(
        act,
        "POST",
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("lines.jsonl", "\n".join(lines).encode(), "application/jsonl")},
        headers=headers,
    )
    if file is None or not file.is_success:
        act.posts = 0
        return
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    made = await client.send(act, "POST", "/v1/batches", json=body, headers=headers)
    # A batch whose answer was lost may run all the same.
    act.posts, act.key = count, None
    if made is None or not made.is_success:
        return
    act.result = "placed"
    for _ in range(200):
        found = await client.send(act, "GET", f"/v1/batches/{made.json()['id']}")
        if found is not None and found.is_success and found.json()["status"] == "completed":
            act.result = "completed"
            return
        await asyncio.sleep(1)
    client.violations.append(f"batch: {made.json()['id']} did not complete")


# --- Lookups and invalid requests ----------------------------------------------------------------


async def questions(client: Client) -> None:
    act = client.begin("question")
    path = client.chance.choice(
        [
            "/v1/balance",
            "/v1/usage?group_by=model",
            "/v1/requests?limit=20",
            "/v1/requests/summary",
            "/v1/models",
            "/v1/catalog",
            "/v1/ledger",
            "/v1/models/echo/stats",
            "/v1/usage/export?format=csv",
        ]
    )
    with contextlib.suppress(httpx.HTTPError):
        answer = await client.http.get(client.url + path, headers=client.headers(act))
        client.check(act, answer)
        act.result = str(answer.status_code)


POISON: Final[list[tuple[str, bytes]]] = [
    ("/v1/chat/completions", b'{"model":"\xff"}'),
    ("/v1/chat/completions", b"[" * 5000),
    ("/v1/chat/completions", b'{"a":' * 2000),
    ("/v1/chat/completions", b'{"model":"echo","messages":[{"role":"user","content":"a\\u0000"}]}'),
    (
        "/v1/chat/completions",
        b'{"model":"echo","messages":[{"role":"user","content":"a"}],'
        b'"logit_bias":{"18446744073709551616":1}}',
    ),
    ("/v1/completions", b'{"model":"echo","prompt":[18446744073709551616]}'),
    ("/v1/embeddings", b'{"model":"pocket-embed","input":[18446744073709551616]}'),
    (
        "/v1/requests",
        b'{"model":"echo","input":{"messages":[{"role":"user","content":"a"}]},'
        b'"webhook":"https://8.8.8.8/\\u0001"}',
    ),
    (
        "/v1/requests",
        b'{"model":"echo","input":{"messages":[{"role":"user","content":"a"}]},'
        b'"metadata":{"project":"a\\u0000b"}}',
    ),
    ("/v1/requests", b'{"model":"pocket-upscale","input":{"image":"data:image/png;base64,AAAA"}}'),
    ("/v1/images/generations", b'{"model":"pocket-image","prompt":"a","n":99999999999999999999}'),
    ("/v1/audio/speech", b'{"model":"pocket-speech","voice":"\\ud800","input":"a"}'),
]


async def poison(client: Client) -> None:
    act = client.begin("poison")
    path, body = client.chance.choice(POISON)
    with contextlib.suppress(httpx.HTTPError):
        answer = await client.http.post(
            client.url + path,
            content=body,
            headers={**client.headers(act), "Content-Type": "application/json"},
        )
        act.result = str(answer.status_code)
        client.check(act, answer)
        if answer.is_success:
            # What passes the gateway, an engine refuses; it is an order all the same.
            act.posts += 1
            client.hear(act, answer)


BEHAVIOURS: Final[dict[Behaviour, int]] = {
    chat_whole: 10,
    chat_streamed: 8,
    completion: 2,
    response: 3,
    embedding: 2,
    picture: 2,
    picture_previewed: 2,
    edit: 1,
    speech: 2,
    native: 10,
    batch: 1,
    questions: 4,
    poison: 4,
}


async def live(client: Client, until: asyncio.Event) -> None:
    """Do one thing after the other until the time is up."""
    while not until.is_set():
        behaviour = client.chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        await behaviour(client)


def tally(acts: list[Act]) -> Counter[tuple[str, str]]:
    return Counter((act.kind, act.result) for act in acts)


def _chat(model: str, text: str, act: Act) -> dict[str, Any]:
    return {"model": model, **_messages(text), "metadata": {"act": act.name}}


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), "teal").save(out, "PNG")
    return out.getvalue()


def _portrait() -> str:
    path = "docs/img/portrait.png"
    with open(path, "rb") as file:
        return _data(file.read())


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
