"""An OpenAI-compatible server that responds immediately, as upstream of both sides of a comparison.

python -m benchmarks.fake_upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

_USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
_ENVELOPE = {"id": "chatcmpl-1", "created": 1, "model": "fake"}
_ANSWER = json.dumps(
    {
        **_ENVELOPE,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello big world"},
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    }
).encode()
_CHUNK = {**_ENVELOPE, "object": "chat.completion.chunk"}
_STREAM = (
    b"".join(
        b"data: " + json.dumps(chunk).encode() + b"\n\n"
        for chunk in (
            {
                **_CHUNK,
                "choices": [
                    {"index": 0, "delta": {"role": "assistant", "content": "hello big world"}}
                ],
            },
            {**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {**_CHUNK, "choices": [], "usage": _USAGE},
        )
    )
    + b"data: [DONE]\n\n"
)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        body = b""
        if b"content-length: " in head:
            length = int(head.split(b"content-length: ")[1].split(b"\r")[0])
            body = await reader.readexactly(length)
        streamed = b'"stream":true' in body.replace(b" ", b"")
        kind, content = (
            (b"text/event-stream", _STREAM) if streamed else (b"application/json", _ANSWER)
        )
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (kind, len(content), content)
        )


async def main(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
