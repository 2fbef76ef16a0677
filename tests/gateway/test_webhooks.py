"""Webhooks: signed, sent when a request has ended, retried, and never to private networks."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from standardwebhooks import Webhook

from gateway.checks.public_urls import check_public_url
from gateway.errors import InvalidRequest
from tests.stack import Stack, wait_for

Received = list[tuple[dict[str, str], bytes]]


@pytest.fixture
def receiver() -> Iterator[tuple[str, Received]]:
    """A server that answers 500 to the first call and 200 to every other."""
    received: Received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((dict(self.headers.items()), body))
            self.send_response(500 if len(received) == 1 else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook?x=1", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_webhook_is_signed_and_retried_until_it_is_accepted(
    stack: Stack, receiver: tuple[str, Received]
) -> None:
    url, received = receiver
    caller = stack.caller()
    secret = caller.http.get("/v1/webhook-secret").json()["secret"]
    value = {"messages": [{"role": "user", "content": "one two"}]}

    placed = caller.http.post(
        "/v1/requests", json={"model": "echo", "input": value, "webhook": url}
    ).json()

    wait_for(lambda: len(received) == 2, "the second try")
    for headers, body in received:
        told = Webhook(secret).verify(body, headers)
        assert told["type"] == "request.succeeded"
        assert told["data"]["id"] == placed["id"]
        assert told["data"]["cost"] == "0.0000002"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/hook",
        "https://127.0.0.1/hook",
        "https://10.1.2.3/hook",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/hook",
        "https://user:secret@example.com/",
        "ftp://example.com/",
        "https://",
        "hook",
        "https://example.com:99999/",
        "https://example.com:0/",
        "https://8.8.8.8/\u0001",
        "https://8.8.8.8/\u0000",
        "https://example.com/a b",
        "https://example.com/\u00a0",
        "https://ex ample.com/",
        "https://example.com\\@10.1.2.3/",
        "https://example.com/a\\b",
        "https://@example.com/",
        "https://example.com/#part",
        "https://a..b/",
        "https://☃.net/",
        "https://%31%32%37.0.0.1/",
        f"https://{'a' * 64}.com/",
        f"https://{'a.' * 127}com/",
        "https://[fe80::1%25eth0]/",
        "https://[::1/",
    ],
)
def test_webhook_urls_of_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="webhook"):
        check_public_url(url, param="webhook", private_allowed=False)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "https://münchen.de/hook",
        "https://xn--mnchen-3ya.de:8443/hook?a=b",
        "https://example.com./höök?ü=%20",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]:443/hook",
        "https://my_host.example.com/a@b",
    ],
)
def test_a_public_address_is_accepted(url: str) -> None:
    assert check_public_url(url, param="webhook", private_allowed=False) == url
