"""Be called when a request ends, and check that the call is the gateway's.

Gateways call public HTTPS URLs only. To receive on your own machine, start yours with
`TOLLGATE_WEBHOOK_PRIVATE_ADDRESSES=true`. Needs `pip install standardwebhooks`.
"""

from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook
from tollgate import api, checked

webhook = Webhook(checked(api.get("/v1/webhook-secret"))["secret"])
received = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # Raises if the signature is wrong or old. The same webhook can arrive twice.
        received.append(webhook.verify(body, dict(self.headers)))
        self.send_response(204)
        self.end_headers()


server = HTTPServer(("127.0.0.1", 0), Receiver)
ordered = checked(
    api.post(
        "/v1/requests",
        json={
            "model": "pocket-chat",
            "input": {"messages": [{"role": "user", "content": "What is a receipt?"}]},
            "webhook": f"http://127.0.0.1:{server.server_port}/",
        },
    )
)
while not received:  # a receiver of yours would call serve_forever()
    server.handle_request()
server.server_close()
print(f"{received[0]['type']} of {ordered['id']}")
