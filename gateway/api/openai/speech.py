"""OpenAI's speech, streamed while it is synthesised: as bytes, or as events with audio chunks.

A failure before the first byte is answered with its HTTP status. A stream that fails later ends
without its last chunk, or with an error event, so that no client mistakes a part for the whole.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from litestar import Controller, post
from litestar.response import Stream

from gateway.api.http.answering import to_submission
from gateway.api.http.answers import (
    KEEP_ALIVE,
    encode_json,
    event_data,
    event_stream,
    exact_number,
)
from gateway.api.http.audio_response import StartedAudio, start_audio, stream_audio
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.content_types import AUDIO, EVENTS
from gateway.api.http.forms import documented_body, receive
from gateway.api.http.media_views import blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.api.openai.speech_bodies import NAMES, SpeechBody
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.batches.stored import place
from gateway.errors import TollgateError, rename, render_openai
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.audio import choose_audio_task
from gateway.tasks.submission import Submission


class SpeechController(Controller):
    path = "/v1/audio"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        "/speech",
        status_code=200,
        opt={"media": [EVENTS, *AUDIO]},
        operation_id="CreateSpeech",
        operation_class=documented_body(SpeechBody),
        summary="Synthesise speech, streamed as bytes or as events",
        description="`stream_format: sse` sends `speech.audio.delta` and `speech.audio.done`. "
        "Accepts OpenAI's fields and those of a native request; a `recording` can be a file "
        "of the form.",
    )
    async def create(self, request: ApiRequest) -> Stream:
        received = await receive(request, repeated={})
        try:
            data = received.read(SpeechBody)
            started = await _start(request, data, received.canonical)
        finally:
            await received.close()
        if data.stream_format == "sse":
            return event_stream(_events(started), headers=started.headers())
        return stream_audio(started, data.wanted)


async def _start(request: ApiRequest, data: SpeechBody, canonical: bytes | None) -> StartedAudio:
    """Submit a request and wait for its first audio."""
    value = data.speech()
    try:
        submission = await to_submission(
            request,
            model=data.model,
            task=choose_audio_task(request.services.requests.quotes.find(data.model), value),
            input=value,
            stream=True,
            canonical=canonical,
        )
        ticket = await request.services.requests.submit(request.caller, submission)
        request.caller.rename_warnings(NAMES)
        return await start_audio(request, ticket)
    except TollgateError as error:
        rename(error, NAMES)
        raise


async def _events(started: StartedAudio) -> AsyncIterator[bytes]:
    try:
        async for data in started.chunks():
            if not data:
                yield KEEP_ALIVE
                continue
            yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
        done = {"type": "speech.audio.done", "usage": speech_usage(started.audio.ticket.result)}
        yield _event(done)
    except TollgateError as error:
        rename(error, NAMES)
        yield event_data(render_openai(error), name="error")


def _event(body: dict[str, Any]) -> bytes:
    return event_data(body, name=body["type"])


def speech_usage(closed: ClosedRequest) -> dict[str, Any]:
    """Return OpenAI's token counts, which are 0 here, next to the actual counts."""
    return {
        "input_tokens": closed.usage.input_tokens,
        "output_tokens": closed.usage.output_tokens,
        "total_tokens": closed.usage.tokens,
        "characters": closed.usage.characters,
        "seconds": closed.usage.audio_ms / 1000,
        "cost": exact_number(closed.cost_nanos),
    }


def batch_submission(body: Mapping[str, Any], entries: Entries) -> Submission:
    """Check one body of a batch."""
    data = read_body(SpeechBody, body)
    refuse_in_batch(data, "stream_format")
    value = data.speech()
    task = choose_audio_task(entries(data.model), value)
    return Submission(model=data.model, task=task, input=value)


def _batch_answer(closed: ClosedRequest, _: Mapping[str, Any]) -> bytes:
    """Return what the live endpoint sends as bytes, with a placeholder for the audio."""
    data = [
        {
            **place(blob, None),
            "content_type": blob.content_type,
            "seconds": medium.duration_ms / 1000,
        }
        for medium in media_of(closed)
        if medium.kind == "audio" and (blob := blob_of(closed, medium)) is not None
    ]
    return encode_json(
        {
            "object": "audio.speech",
            "created": int(closed.accepted_at.timestamp()),
            "model": closed.model,
            "data": data,
            "usage": speech_usage(closed),
        }
    )


BATCHES: Final = BatchEndpoint(
    f"{SpeechController.path}/speech",
    read=batch_submission,
    answer=_batch_answer,
    brings_files=True,
    names=NAMES,
)
