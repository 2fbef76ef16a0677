"""GMI Cloud's request queue: a real HTTP server with its wire format.

Each poll advances an order by one state. The test sets the outcome and the faults; a fault answers
a call instead of the service, or closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import time
import wave
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests.workers.hosting import listening
from tests.workers.running import PATIENCE_S
from workers.media import encode

PREFIX = "/api/v1/ie/requestqueue/apikey"
KEY = "gmi-secret"
SIGNED = {
    "jpeg": "image/jpeg",
    "jpg": "image/jpg",
    "png": "image/png",
    "mp4": "video/mp4",
    "mp3": "audio/mp3",
    "wav": "audio/wav",
}


def picture(width: int = 48, height: int = 32) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(out, "PNG")
    return out.getvalue()


def clip(frames: int = 12, fps: int = 12) -> bytes:
    return encode.video([np.full((32, 48, 3), n * 9, np.uint8) for n in range(frames)], fps)


def sound(seconds: float = 0.5) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(8000)
        wav.writeframes(bytes(round(16_000 * seconds)))
    return out.getvalue()


@dataclass(frozen=True)
class Fault:
    """A fault of one call instead of its regular response."""

    method: str
    path: str
    """Part of the path."""
    status: int = 500
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs_up: bool = False
    """Whether the connection is closed without a response."""
    is_taken: bool = False
    """Whether the order is accepted nevertheless."""
    waits: asyncio.Event | None = None


@dataclass
class Order:
    id: str
    model: str
    payload: dict[str, Any]
    states: list[str]
    created_at: int = field(default_factory=lambda: int(time.time()))
    polls: int = 0

    @property
    def state(self) -> str:
        return self.states[0]


class FakeGmi:
    def __init__(self) -> None:
        self.port = 0
        self.models = {"seedream-5.0-lite": ("request", "0.035"), "their-name": ("request", "0.05")}
        self.published: dict[str, dict[str, Any]] = {}
        """What is published of a model in addition, by its name."""
        self.states = ["queued", "dispatched", "processing", "success"]
        """States of every future order; with a single one, the order ends with its submission."""
        self.outcome: Callable[[Order], dict[str, Any]] = lambda order: {
            "media_urls": [{"id": "0", "url": self.host(picture(), "image/png")}]
        }
        self.polls_without_outcome = 0
        """Polls of an order that ended before its outcome is returned."""
        self.error = "the model ran out of ideas"
        self.orders: dict[str, Order] = {}
        self.deleted: list[str] = []
        self.faults: list[Fault] = []
        self.uploads: dict[str, tuple[str, bytes | None]] = {}
        self.hosted: dict[str, tuple[str, bytes, dict[str, str]]] = {}
        self.calls: list[str] = []
        self.credentials: set[str] = set()
        """Credentials of calls outside the queue's API; there should be none."""
        self.changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def order(self) -> Order:
        """Return the only order."""
        (order,) = self.orders.values()
        return order

    def host(self, data: bytes, content_type: str, **headers: str) -> str:
        """Host a file for download. Return its URL."""
        path = f"/media/{len(self.hosted)}"
        self.hosted[path] = (content_type, data, headers)
        return self.url + path

    def count(self, call: str) -> int:
        return sum(made.startswith(call) for made in self.calls)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    # --- HTTP -------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (x.partition(":") for x in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                self.calls.append(f"{method} {path.removeprefix(PREFIX)}")
                answer = await self._answer(method, path, headers, body)
                self.changed.set()
                if answer is None:
                    break
                status, content_type, data, more = answer
                head = [
                    f"HTTP/1.1 {status} X",
                    f"Content-Type: {content_type}",
                    f"Content-Length: {len(data)}",
                    *(f"{name.replace('_', '-')}: {value}" for name, value in more.items()),
                ]
                writer.write("\r\n".join([*head, "", ""]).encode() + data)
                await writer.drain()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, str, bytes, Mapping[str, str]] | None:
        for fault in self.faults:
            if fault.method == method and fault.path in path:
                self.faults.remove(fault)
                if fault.is_taken:
                    self._call(method, path.removeprefix(PREFIX), body)
                if fault.waits is not None:
                    self.changed.set()
                    await fault.waits.wait()
                    break
                if fault.hangs_up:
                    return None
                return (
                    fault.status,
                    "application/json",
                    json.dumps(fault.body).encode(),
                    fault.headers,
                )
        if not path.startswith(PREFIX):
            self.credentials |= {headers["authorization"]} if "authorization" in headers else set()
            return self._store(method, path, headers, body)
        if headers.get("authorization") != f"Bearer {KEY}":
            status, answer = 401, {"error": "invalid api key"}
        else:
            status, answer = self._call(method, path.removeprefix(PREFIX), body)
        return status, "application/json", json.dumps(answer).encode(), {}

    def _store(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, str, bytes, Mapping[str, str]]:
        if method == "PUT" and path in self.uploads:
            signed, _ = self.uploads[path]
            if headers.get("content-type") != signed:
                return 403, "application/xml", b"<Code>SignatureDoesNotMatch</Code>", {}
            self.uploads[path] = (signed, body)
            return 200, "text/plain", b"", {}
        if method == "GET" and path in self.hosted:
            content_type, data, more = self.hosted[path]
            return int(more.get("status", 200)), content_type, data, more
        return 404, "text/plain", b"nothing here", {}

    # --- The queue --------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if (method, path) == ("GET", "/models"):
            return 200, {"model_ids": list(self.models)}
        if found := re.fullmatch(r"/models/(.+)", path):
            return self._model(found[1])
        if (method, path) == ("POST", "/upload-url"):
            return self._upload_url(json.loads(body)["file_type"])
        if (method, path) == ("POST", "/requests"):
            return self._take(json.loads(body))
        order = self.orders.get(path.removeprefix("/requests/"))
        if order is None:
            return 404, {"error": "request not found"}
        if method == "DELETE":
            self.deleted.append(order.id)
            order.states = ["cancelled"]
        else:
            order.polls += 1
            if len(order.states) > 1:
                order.states.pop(0)
        return 200, self._view(order)

    def _model(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.models:
            return 404, {"error": "model not found"}
        kind, price = self.models[name]
        return 200, {
            "model": name,
            "model_type": "image",
            "status": "active",
            "price_info": {"price": price, "pricing_type": kind, "unit": "USD"},
        } | self.published.get(name, {})

    def _upload_url(self, file_type: str) -> tuple[int, dict[str, Any]]:
        if file_type not in SIGNED:
            return 400, {"error": f"unsupported file_type: {file_type}"}
        path = f"/upload/{len(self.uploads)}.{file_type}"
        self.uploads[path] = (SIGNED[file_type], None)
        return 200, {"upload_url": self.url + path, "public_url": f"https://files.example{path}"}

    def _take(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if asked["model"] not in self.models:
            return 404, {"error": "model not found"}
        if not asked["payload"]:
            return 400, {"error": "payload is required"}
        order = Order(f"r-{len(self.orders)}", asked["model"], asked["payload"], list(self.states))
        self.orders[order.id] = order
        return 200, self._view(order)

    def _view(self, order: Order) -> dict[str, Any]:
        view: dict[str, Any] = {
            "request_id": order.id,
            "model": order.model,
            "status": order.state,
            "created_at": order.created_at,
            "updated_at": order.created_at,
            "queued_at": order.created_at,
        }
        if order.state == "success":
            view |= {"payload": order.payload, "outcome": self.outcome(order)}
            if order.polls < self.polls_without_outcome:
                view["outcome"] = None
        if order.state == "failed":
            view |= {"outcome": {"error": self.error}}
        return view


@contextlib.asynccontextmanager
async def fake_gmi() -> AsyncIterator[FakeGmi]:
    service = FakeGmi()
    async with listening(service):
        yield service
