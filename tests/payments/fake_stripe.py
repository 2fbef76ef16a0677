"""A fake of Stripe's API: creates and lists Checkout sessions, in its wire format."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs


@dataclass
class FakeStripe:
    """``asked`` has the fields and headers of each requested session."""

    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    broken: bool = False


@contextmanager
def fake_stripe() -> Iterator[FakeStripe]:
    fake = FakeStripe()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if fake.broken:
                return self.answer(402, {"error": {"type": "card_error", "message": "No."}})
            fields = {name: values[0] for name, values in body.items()}
            fields["Idempotency-Key"] = self.headers["Idempotency-Key"]
            fields["Authorization"] = self.headers["Authorization"]
            fake.asked.append(fields)
            id = f"cs_test_{len(fake.asked)}"
            return self.answer(
                200, session(id, int(fields["line_items[0][price_data][unit_amount]"]))
            )

        def do_GET(self) -> None:
            paid = [session("cs_test_1", 2500) | {"payment_status": "paid", "status": "complete"}]
            listed = {"object": "list", "data": paid, "has_more": False, "url": self.path}
            self.answer(200, listed)

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Request-Id", "req_fake")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def session(id: str, amount: int) -> dict[str, object]:
    return {
        "id": id,
        "object": "checkout.session",
        "amount_total": amount,
        "currency": "usd",
        "mode": "payment",
        "payment_intent": None,
        "payment_status": "unpaid",
        "status": "open",
        "url": f"https://checkout.stripe.com/c/pay/{id}",
    }
