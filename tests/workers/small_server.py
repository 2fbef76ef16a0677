"""A server for tests of commands: ready after a while, with a child process, speaks OpenAI's API.

Usage: small_server.py PORT [--slow SECONDS] [--note PATH] [--fail STATUS]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    started_s = time.monotonic()
    slow_s = 0.0

    def do_GET(self) -> None:
        ready = time.monotonic() - self.started_s >= self.slow_s
        self._send(200 if ready else 503, "application/json", b'{"data": []}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunks = [{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}]
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--note", type=Path)
    parser.add_argument("--fail", type=int)
    given = parser.parse_args()
    if given.fail is not None:
        sys.stderr.write("loading weights\nno kernel image is available")
        sys.exit(given.fail)
    child = subprocess.Popen(["sleep", "600"])
    if given.note is not None:
        told = {
            "pids": [os.getpid(), child.pid],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "environment": sorted(os.environ),
        }
        given.note.write_text(json.dumps(told))
    Handler.slow_s = given.slow
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
