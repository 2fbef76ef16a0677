"""ElevenLabs' speech and music: its clients work here with another base URL.

A call can omit the model. It then gets ElevenLabs' default if the catalog has it, possibly as an
alias; otherwise the catalog's first model that has the voice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.background_tasks import BackgroundTask
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream

from gateway.api.elevenlabs.bodies import ComposedBody, SpokenBody, read_format
from gateway.api.elevenlabs.views import (
    MUSIC_TASK,
    SoundModelView,
    has_unknown_voices,
    has_voice,
    models_view,
    supports,
    voice_of,
)
from gateway.api.http.answering import to_submission
from gateway.api.http.answers import json_response
from gateway.api.http.audio_response import start_audio, stream_audio
from gateway.api.http.content_types import AUDIO
from gateway.api.http.dialects import ELEVENLABS
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest, NotFound, TollgateError, rename, unknown_model
from gateway.tasks.audio import MusicTask, SpeechTask, choose_audio_task
from gateway.tasks.submission import Submission
from gateway.voices.store import is_voice_id
from workers.contract.media import characters

DEFAULT_SPEECH_MODEL: Final = "eleven_multilingual_v2"
DEFAULT_MUSIC_MODEL: Final = "music_v1"
"""ElevenLabs' default models."""
AUDIO_ROUTE: Final[dict[str, Any]] = {
    "status_code": 200,
    "opt": {"scope": "inference", "holds": True, "media": AUDIO},
}


def _speak(path: str, *, stream: bool, operation_id: str, summary: str) -> HTTPRouteHandler:
    @post(path, **AUDIO_ROUTE, operation_id=operation_id, summary=summary)
    async def speak(
        self: Controller,
        request: ApiRequest,
        voice_id: FromPath[str],
        data: JSONBody[SpokenBody],
        output_format: FromQuery[str | None] = None,
        enable_logging: FromQuery[bool] = True,
    ) -> Stream:
        submission = await _speech_submission(request, voice_id, data, output_format, stream=stream)
        return await _answer(request, submission, data, stored=enable_logging)

    return speak


def _compose(path: str, *, stream: bool, operation_id: str, summary: str) -> HTTPRouteHandler:
    @post(path, **AUDIO_ROUTE, operation_id=operation_id, summary=summary)
    async def compose(
        self: Controller,
        request: ApiRequest,
        data: JSONBody[ComposedBody],
        output_format: FromQuery[str | None] = None,
        enable_logging: FromQuery[bool] = True,
    ) -> Stream:
        submission = await _music_submission(request, data, output_format, stream=stream)
        return await _answer(request, submission, data, stored=enable_logging)

    return compose


class ElevenLabsController(Controller):
    path = f"{ELEVENLABS}/v1"
    tags = ["ElevenLabs"]

    @get(
        "/models",
        opt={"scope": "read"},
        operation_id="ElevenLabsListModels",
        summary="List audio models, with their exact prices",
    )
    async def models(self, request: ApiRequest) -> Response[list[SoundModelView]]:
        return json_response(
            models_view(_entries(request), request.services.requests.health.announcements)
        )

    speak = _speak(
        "/text-to-speech/{voice_id:str}",
        stream=False,
        operation_id="ElevenLabsSpeak",
        summary="Synthesise speech; the response is the audio, with its cost in a header",
    )
    speak_stream = _speak(
        "/text-to-speech/{voice_id:str}/stream",
        stream=True,
        operation_id="ElevenLabsSpeakStream",
        summary="Synthesise speech, streamed while it is generated",
    )
    compose = _compose(
        "/music",
        stream=False,
        operation_id="ElevenLabsCompose",
        summary="Generate music; the response is the audio, with its cost in a header",
    )
    compose_stream = _compose(
        "/music/stream",
        stream=True,
        operation_id="ElevenLabsComposeStream",
        summary="Generate music, streamed while it is generated",
    )

    @post(
        [
            "/text-to-speech/{voice_id:str}/with-timestamps",
            "/text-to-speech/{voice_id:str}/stream/with-timestamps",
        ],
        opt={"scope": "inference", "holds": True},
        include_in_schema=False,
    )
    async def speak_timed(self, voice_id: FromPath[str]) -> Response[None]:
        raise InvalidRequest(
            "unsupported", "Timestamps are not supported by the models served here."
        )


# --- Submissions ----------------------------------------------------------------------------------


async def _speech_submission(
    request: ApiRequest,
    voice_id: str,
    data: SpokenBody,
    output_format: str | None,
    *,
    stream: bool,
) -> Submission:
    made = read_format(output_format)
    is_stored = is_voice_id(voice_id)
    has = functools.partial(has_voice, voice_id=voice_id, stored=is_stored)
    name, entry = _model(request, data.model_id, DEFAULT_SPEECH_MODEL, has)
    if entry is None or not (has(entry) or has_unknown_voices(entry)):
        where = f" of {entry.name}" if entry is not None else ""
        raise NotFound(
            "voice_not_found",
            f"No such voice{where}: {voice_id!r}; GET v1/voices lists the available ones.",
            param="voice_id",
        )
    value = data.speech_task(entry, voice_of(entry, voice_id), made)
    task = choose_audio_task(entry, value)
    return await to_submission(request, model=name, task=task, input=value, stream=stream)


async def _music_submission(
    request: ApiRequest,
    data: ComposedBody,
    output_format: str | None,
    *,
    stream: bool,
) -> Submission:
    made = read_format(output_format)
    name, entry = _model(
        request, data.model_id, DEFAULT_MUSIC_MODEL, lambda one: supports(one, MUSIC_TASK)
    )
    if entry is None:
        raise NotFound("model_not_found", "No music model is available.", param="model_id")
    value = data.music_task(entry, made)
    return await to_submission(request, model=name, task=MUSIC_TASK, input=value, stream=stream)


def _model(
    request: ApiRequest,
    asked: str | None,
    usual: str,
    fits: Callable[[CatalogEntry], bool],
) -> tuple[str, CatalogEntry | None]:
    """Return the name to submit and its catalog entry, or None if no model fits.

    Raise ``NotFound`` if the client named an unknown model.
    """
    live = request.services.live
    account_id = request.key.account_id
    name = asked or usual
    entry = live.entry(live.resolve(name), account_id)
    if entry is not None and (asked is not None or request.key.allows(entry.name)):
        return name, entry
    if asked is not None:
        raise unknown_model(asked, param="model_id", listed="GET v1/models")
    entry = next(filter(fits, request.entries()), None)
    return (entry.name if entry is not None else name), entry


def _entries(request: ApiRequest) -> Sequence[CatalogEntry]:
    return request.entries()


# --- Responses ------------------------------------------------------------------------------------


async def _answer(
    request: ApiRequest,
    submission: Submission,
    data: SpokenBody | ComposedBody,
    *,
    stored: bool,
) -> Stream:
    """Submit a request and respond with its audio. Unless ``stored``, delete it afterwards."""
    try:
        ticket = await request.services.requests.submit(request.caller, submission)
        request.caller.rename_warnings(data.names)
        # Without streaming, the first chunk arrives at the end, when the cost is known.
        started = await start_audio(request, ticket)
    except TollgateError as error:
        rename(error, data.names)
        raise
    assert isinstance(submission.input, SpeechTask | MusicTask)
    answer = stream_audio(started, submission.input.format or "mp3")
    answer.headers["request-id"] = ticket.request_id
    if isinstance(data, SpokenBody):
        answer.headers["character-cost"] = str(characters(data.text))
    if not stored:
        answer.background = BackgroundTask(
            request.services.requests.forget, ticket.account_id, ticket.request_id
        )
    return answer
