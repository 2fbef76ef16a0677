"""OpenAI's transcriptions and translations of recordings: as JSON, text, subtitles or a stream.

Text of a stream is final when it is sent: a window's text is sent segment by segment, unless the
whole recording is one window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias, TypedDict, cast

import msgspec
from litestar import Controller, Response, post
from litestar.response import Stream
from pydantic import ConfigDict, Field, StringConstraints

from gateway.api.http.answering import stream_answer, to_submission
from gateway.api.http.answers import (
    ExactUsd,
    encode_json,
    event_data,
    exact_number,
    request_headers,
)
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.content_types import EVENTS
from gateway.api.http.fields import ModelName, Refused
from gateway.api.http.forms import documented_body, receive
from gateway.api.http.request import ApiRequest
from gateway.api.http.text_stream import TextStream, choices_of, cut_reason
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, RequestFailed, TollgateError, rename, render_openai
from gateway.files.sources import SourceField
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import Ticket, raise_unless_succeeded
from gateway.tasks.submission import Submission
from gateway.tasks.transcription import TASK, Granularity, TranscriptionTask
from gateway.tasks.visual import PROMPT_MAX
from workers.contract.jobs import SentEvent
from workers.contract.media import TranscribedSegment, Transcript

PLAIN: Final = "text/plain"
NAMES: Final[Mapping[str, str]] = {"audio": "file", "timestamps": "timestamp_granularities"}
"""OpenAI's names of our fields, for error messages."""
Format: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]
_TIMED: Final = ("srt", "verbose_json", "vtt")
"""Formats with the times of segments."""


class TranslationBody(StrictModel):
    """Body of ``POST /v1/audio/translations``, and of ``/transcriptions`` with more fields."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "whisper", "file": "data:audio/wav;base64,UklGRg=="}]
        },
    )

    model: ModelName
    file: SourceField
    prompt: Annotated[str, StringConstraints(max_length=PROMPT_MAX)] | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None

    def task(self) -> TranscriptionTask:
        """Return the task's input."""
        return self._task(translate=True)

    def _task(self, **more: Any) -> TranscriptionTask:
        granularities: list[Granularity] = ["segment"] if self.response_format in _TIMED else []
        given = {"timestamps": granularities, **more}
        return TranscriptionTask.model_construct(
            audio=self.file, prompt=self.prompt, temperature=self.temperature, **given
        )


class TranscriptionBody(TranslationBody):
    """Body of ``POST /v1/audio/transcriptions``."""

    language: Annotated[str, StringConstraints(max_length=100)] | None = None
    timestamp_granularities: Annotated[list[Granularity], Field(max_length=2)] | None = None
    stream: bool | None = None
    # Accepted without effect: long recordings are always divided into windows.
    chunking_strategy: Literal["auto"] | None = None

    # Known but refused: ignoring them would change the answer without notice.
    include: Refused[Any] = None
    known_speaker_names: Refused[Any] = None
    known_speaker_references: Refused[Any] = None

    def task(self) -> TranscriptionTask:
        """Return the task's input. Raise ``InvalidRequest`` for fields that exclude each other."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                "invalid_value",
                "timestamp_granularities needs response_format: verbose_json.",
                param="timestamp_granularities",
            )
        if self.stream and self.response_format not in (None, "json", "text"):
            raise InvalidRequest(
                "invalid_value",
                f"response_format is {self.response_format}; a stream has the formats json and "
                "text.",
                param="response_format",
            )
        more: dict[str, Any] = {"language": self.language}
        if self.timestamp_granularities:
            more["timestamps"] = self.timestamp_granularities
        return self._task(**more)


class DurationUsageView(TypedDict):
    type: Literal["duration"]
    seconds: float
    cost: ExactUsd


class SegmentView(TypedDict):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordView(TypedDict):
    word: str
    start: float
    end: float


class TranscriptionView(TypedDict):
    """A transcript; all but the text and the usage belong to ``verbose_json``."""

    text: str
    usage: DurationUsageView
    task: NotRequired[Literal["transcribe", "translate"]]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[SegmentView]]
    words: NotRequired[list[WordView]]


class TranscriptionsController(Controller):
    path = "/v1/audio"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        "/transcriptions",
        status_code=200,
        opt={"media": [EVENTS, PLAIN]},
        operation_id="CreateTranscription",
        operation_class=documented_body(TranscriptionBody),
        summary="Transcribe a recording, in one response or as a stream",
        description="`stream: true` sends `transcript.text.delta` and `transcript.text.done`.",
    )
    async def transcribe(self, request: ApiRequest) -> Response[TranscriptionView] | Stream:
        return await _create(request, TranscriptionBody)

    @post(
        "/translations",
        status_code=200,
        opt={"media": [PLAIN]},
        operation_id="CreateTranslation",
        operation_class=documented_body(TranslationBody),
        summary="Transcribe a recording in English, whatever is spoken",
    )
    async def translate(self, request: ApiRequest) -> Response[TranscriptionView] | Stream:
        return await _create(request, TranslationBody)


async def _create(
    request: ApiRequest, schema: type[TranslationBody]
) -> Response[TranscriptionView] | Stream:
    received = await receive(request, repeated={})
    try:
        data = received.read(schema)
        ticket = await _submit(request, data, received.canonical)
    finally:
        await received.close()
    try:
        if _streams(data):
            return stream_answer(request, ticket, TranscriptWriter(ticket))
        with ticket:
            closed = await ticket.closed(request)
        raise_unless_succeeded(closed)
    except TollgateError as error:
        rename(error, NAMES)
        raise
    is_json = data.response_format in (None, "json", "verbose_json")
    answer = Response(
        _answer(closed, data),
        media_type="application/json" if is_json else PLAIN,
        headers=request_headers(closed.request_id, closed),
    )
    return cast("Response[TranscriptionView]", answer)


async def _submit(request: ApiRequest, data: TranslationBody, canonical: bytes) -> Ticket:
    try:
        submission = await to_submission(
            request,
            model=data.model,
            task=TASK,
            input=data.task(),
            stream=_streams(data),
            canonical=canonical,
        )
        return await request.services.requests.submit(request.caller, submission)
    except TollgateError as error:
        rename(error, NAMES)
        raise


def _streams(data: TranslationBody) -> bool:
    return isinstance(data, TranscriptionBody) and bool(data.stream)


class TranscriptWriter:
    """Writes the events of a transcript."""

    def __init__(self, ticket: Ticket) -> None:
        self._stream = TextStream(ticket.request_id)

    def write(self, sent: SentEvent) -> bytes:
        """Return the event for new text, or ``b""``."""
        delta = self._stream.receive(sent)
        return b"" if delta is None else self._delta(delta.text)

    def finish(self, closed: ClosedRequest) -> bytes:
        """Return the remaining text, and the whole text with its usage."""
        if cut_reason(closed) is None:
            raise_unless_succeeded(closed)
        rest = b"".join(self._delta(each.text) for each in self._stream.rest(choices_of(closed)))
        name = "transcript.text.done"
        done = {
            "type": name,
            "text": text_of(closed),
            "usage": usage_view(closed),
        }
        return rest + event_data(done, name=name)

    def fail(self, error: RequestFailed) -> bytes:
        rename(error, NAMES)
        return event_data(render_openai(error), name="error")

    @staticmethod
    def _delta(text: str) -> bytes:
        if not text:
            return b""
        name = "transcript.text.delta"
        return event_data({"type": name, "delta": text}, name=name)


def text_of(closed: ClosedRequest) -> str:
    return "".join(choice.text for choice in choices_of(closed))


def transcript_of(closed: ClosedRequest) -> Transcript:
    """Return what is known of a transcript beside its text; nothing of one that an upstream
    returned as text, or that has expired."""
    value = closed.output.value.get("transcript") if closed.output else None
    if value is None:
        return Transcript(closed.usage.audio_ms)
    return msgspec.convert(value, Transcript)


def usage_view(closed: ClosedRequest) -> DurationUsageView:
    return {
        "type": "duration",
        "seconds": closed.usage.audio_ms / 1000,
        "cost": exact_number(closed.cost_nanos),
    }


def transcription_view(closed: ClosedRequest, data: TranslationBody) -> TranscriptionView:
    """Return the answer in the formats ``json`` and ``verbose_json``."""
    view: TranscriptionView = {"text": text_of(closed), "usage": usage_view(closed)}
    if data.response_format != "verbose_json":
        return view
    transcript, task = transcript_of(closed), data.task()
    view["task"] = "translate" if task.translate else "transcribe"
    view["language"] = transcript.language
    view["duration"] = transcript.duration_ms / 1000
    if "segment" in (task.timestamps or ()):
        view["segments"] = [
            {
                "id": place,
                "seek": one.seek,
                "start": one.start_ms / 1000,
                "end": one.end_ms / 1000,
                "text": one.text,
                "tokens": list(one.tokens),
                "temperature": task.temperature or 0.0,
                "avg_logprob": one.avg_logprob,
                "compression_ratio": one.compression_ratio,
                "no_speech_prob": one.no_speech_prob,
            }
            for place, one in enumerate(transcript.segments)
        ]
    if "word" in (task.timestamps or ()):
        view["words"] = [
            {"word": one.text, "start": one.start_ms / 1000, "end": one.end_ms / 1000}
            for one in transcript.words
        ]
    return view


def _answer(closed: ClosedRequest, data: TranslationBody) -> bytes:
    """Return the answer in the wanted format."""
    segments = transcript_of(closed).segments
    match data.response_format:
        case "text":
            return f"{text_of(closed)}\n".encode()
        case "srt":
            return subtitles(segments, mark=",", numbered=True).encode()
        case "vtt":
            return ("WEBVTT\n\n" + subtitles(segments, mark=".", numbered=False)).encode()
    return encode_json(transcription_view(closed, data))


def subtitles(segments: tuple[TranscribedSegment, ...], *, mark: str, numbered: bool) -> str:
    """Return segments as subtitles; ``mark`` separates the milliseconds of a time."""
    cues = []
    for number, one in enumerate(segments, start=1):
        times = f"{_clock(one.start_ms, mark)} --> {_clock(one.end_ms, mark)}"
        # An arrow would be read as a time.
        text = " ".join(one.text.split()).replace("-->", "->")
        cues.append((f"{number}\n" if numbered else "") + f"{times}\n{text}\n\n")
    return "".join(cues)


def _clock(milliseconds: int, mark: str) -> str:
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{mark}{milliseconds:03d}"


def _read_batch(schema: type[TranslationBody], body: Mapping[str, Any]) -> Submission:
    """Check one body of a batch."""
    data = read_body(schema, body)
    if isinstance(data, TranscriptionBody):
        refuse_in_batch(data, "stream")
    return Submission(model=data.model, task=TASK, input=data.task())


def _batch_answer(
    schema: type[TranslationBody], closed: ClosedRequest, body: Mapping[str, Any]
) -> bytes:
    """Return what the live endpoint sends; text and subtitles as the ``text`` of an object."""
    # The recording of the body has been stored, and is not read again.
    fields = {name: value for name, value in body.items() if name in schema.model_fields}
    data = schema.model_construct(**{**fields, "file": None})
    found = _answer(closed, data)
    is_json = data.response_format in (None, "json", "verbose_json")
    return found if is_json else encode_json({"text": found.decode()})


def _transcription(body: Mapping[str, Any], _: Entries) -> Submission:
    return _read_batch(TranscriptionBody, body)


def _translation(body: Mapping[str, Any], _: Entries) -> Submission:
    return _read_batch(TranslationBody, body)


BATCHES: Final = (
    BatchEndpoint(
        "/v1/audio/transcriptions",
        read=_transcription,
        answer=lambda closed, body: _batch_answer(TranscriptionBody, closed, body),
        brings_files=True,
        names=NAMES,
    ),
    BatchEndpoint(
        "/v1/audio/translations",
        read=_translation,
        answer=lambda closed, body: _batch_answer(TranslationBody, closed, body),
        brings_files=True,
        names=NAMES,
    ),
)
