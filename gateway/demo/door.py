"""A client of the running gateway: orders with an account's key, waits, cancels, sends files."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

PATIENCE_S: Final = 240.0
POLL_S: Final = 0.1
OPEN: Final = ("queued", "running")
BUSY: Final = 503
ATTEMPTS: Final = 6


@dataclass(frozen=True)
class Refused:
    """The gateway did not accept an order."""

    code: str
    message: str


class Door:
    """Calls of the gateway at a URL; several threads can share it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # The gateway can be the proxy's own neighbour; loopback is never proxied.
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def is_live(self) -> bool:
        try:
            return self._http.get("/health/ready", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def call(
        self, method: str, path: str, secret: str, json: object = None, **more: Any
    ) -> Mapping[str, Any]:
        """Return the body of an answer. Raise ``ValueError`` with the gateway's words if it is
        refused."""
        answer = self._answer(method, path, secret, json=json, **more)
        if answer.is_error:
            refused = _refusal(answer)
            raise ValueError(f"{method} {path}: {answer.status_code} {refused.message}")
        body: Mapping[str, Any] = answer.json()
        return body

    def order(self, secret: str, body: Mapping[str, Any]) -> str | Refused:
        """Order a request, again if the gateway is busy; return its id, or why it was refused."""
        for _ in range(ATTEMPTS):
            answer = self._answer("POST", "/v1/requests", secret, json=body)
            if answer.status_code != BUSY:
                break
            time.sleep(float(answer.headers.get("Retry-After", "1")))
        return _refusal(answer) if answer.is_error else str(answer.json()["id"])

    def wait(self, secret: str, request_id: str) -> Mapping[str, Any]:
        """Wait until a request has ended, and return it."""
        return self.wait_for(secret, f"/v1/requests/{request_id}", OPEN)

    def wait_for(self, secret: str, path: str, unfinished: tuple[str, ...]) -> Mapping[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.call("GET", path, secret)
            if found["status"] not in unfinished:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is still {found['status']} after {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)

    def wait_until_running(self, secret: str, request_id: str) -> None:
        self.wait_for(secret, f"/v1/requests/{request_id}", ("queued",))

    def cancel(self, secret: str, request_id: str) -> None:
        self.call("POST", f"/v1/requests/{request_id}/cancel", secret)

    def output(self, request: Mapping[str, Any]) -> str:
        """Return the first file of a request's output as a data URI."""
        medium = next(one for one in request["output"]["media"] if one["role"] == "output")
        answer = self._http.get(medium["url"]).raise_for_status()
        return data_uri(answer.content, answer.headers["content-type"])

    def is_served(self, secret: str, model: str) -> bool:
        answer = self._answer("GET", f"/v1/catalog/{model}", secret)
        return answer.is_success and bool(answer.json().get("available"))

    def knows(self, secret: str) -> bool:
        """Whether the gateway accepts a key: it has the same database and pepper."""
        return self._answer("GET", "/v1/balance", secret).is_success

    def _answer(self, method: str, path: str, secret: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"}
        return self._http.request(method, path, headers=headers, **more)


def data_uri(content: bytes, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(content).decode()}"


def _refusal(answer: httpx.Response) -> Refused:
    error = answer.json()["error"]
    return Refused(str(error["code"]), str(error["message"]))
