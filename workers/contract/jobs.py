"""What crosses the wire: a job, the events of its run, its outcome; and what was measured.

Everything is an immutable msgspec struct in MessagePack. Unknown fields are tolerated, a new field
has a default, a type never changes: bytes recorded in ``tests/contract`` must decode for ever.
This module knows no queue, no engine and no money.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NewType, TypeAlias

import msgspec

from workers.contract.media import File

RequestId = NewType("RequestId", str)
"""``req_`` and 32 hexadecimal digits of a UUID of version 7, made by the gateway."""

VERSION: Final = 1
"""Of the wire format; it rises only when an old reader could not make sense of a new message."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured quantities, in the units of the price list; also the limits of a request.

    The token counts are disjoint: an input token is either cached or not, never counted twice.
    ``characters`` are counted by ``media.characters``; ``audio_ms`` is the sound delivered.
    ``attributes`` select among conditional prices (``size``, ``quality``, ``resolution``).
    """

    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    images: int = 0
    video_ms: int = 0
    audio_ms: int = 0
    characters: int = 0
    steps: int = 0
    gpu_us: int = 0
    attributes: dict[str, str] = {}

    @property
    def tokens(self) -> int:
        """All of them: cached or not, read or written."""
        return self.input_tokens + self.cached_input_tokens + self.output_tokens


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of one request went, in microseconds of a monotonic clock.

    ``queue_us`` runs from enqueue to lease, ``load_us`` is waiting for weights to be loaded; the
    four phases are this request's own share of a batch. ``first_token_us`` runs from enqueue to the
    first token, or the first sound; from there on ``per_token_us`` is the mean time between two
    tokens of one answer, and ``gap_us`` the longest that nothing came. ``total_us`` is the
    gateway's, from acceptance to settlement. Of the tokens that were guessed ahead (``drafted``)
    the model accepted some.
    """

    queue_us: int = 0
    load_us: int = 0
    preprocess_us: int = 0
    transfer_us: int = 0
    forward_us: int = 0
    postprocess_us: int = 0
    first_token_us: int = 0
    total_us: int = 0
    tokens: int = 0
    per_token_us: int = 0
    gap_us: int = 0
    drafted: int = 0
    accepted: int = 0


class BlobRef(msgspec.Struct, frozen=True):
    """An input or output in the blob store: where, how long, and its SHA-256 in hexadecimal."""

    key: str
    bytes: int
    sha256: str
    content_type: str = "application/octet-stream"


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is queued: one request, checked and held for, in terms that a worker understands."""

    request_id: RequestId
    account_id: str
    model: str
    task: str
    input: dict[str, Any]
    """The task's input as checked by the gateway; for ``text-generation`` see ``ChatInput``."""
    limits: Usage = Usage()
    """The most that may be used; the hold covers exactly this."""
    stream: bool = False
    """Whether somebody reads along: events are sent, and a cut stream counts as delivered."""
    deadline_ms: int = 0
    """Unix time in milliseconds; 0 is none."""
    attachments: tuple[BlobRef, ...] = ()
    gateway_note: str = ""
    """The gateway's own, to be found again when the request ends."""
    priority: int = 0
    """Of those in one engine the higher goes first; batches are below 0."""
    stored_under: RequestId | None = None
    """The request whose outputs this job's are, where it is one step of several: they lie among
    that request's in the blob store."""
    workflow: bool = False
    """Of the gateway alone, never queued: the input is a plan of steps, each a job of its own."""
    version: int = VERSION
    note: str = ""
    """What an earlier holder of the job kept for the next one, as far as the gateway knows it; that
    of the lease is newer. See ``Queue.keep``."""
    stored_input: BlobRef | None = None
    """Location of ``input`` if it is too large for the queue, as ``pack_value`` wrote it; ``input``
    is then empty. Deleted when the request ends."""


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model wants called; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may ask for; ``parameters`` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. Content parts of the client's message are joined into plain text by the gateway."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or the model's own token ids."""
ToolChoice: TypeAlias = Literal["auto", "none", "required"]


class ChatInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a ``text-generation`` job. The gateway always sets ``seed``.

    With a seed, a second attempt after a crash repeats the first, so a stream can go on where it
    broke off. Either a conversation (``messages``) is answered, or each of ``prompts`` is continued
    as it stands; choice ``i`` of prompt ``p`` is then number ``p * n + i``.
    """

    messages: tuple[ChatMessage, ...]
    max_tokens: int
    """Of each choice."""
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    """Whether the text of a choice begins with its prompt; only of ``prompts``."""
    seed: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 considers all tokens."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: dict[str, Any] | None = None
    """``{"type": "json_object"}``, or ``json_schema`` with the client's ``json_schema``."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    """The one function that must be called."""
    parallel_tool_calls: bool = True

    @property
    def choices(self) -> int:
        """Answers in all."""
        return self.n * max(1, len(self.prompts))


class EmbeddingInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a ``text-embedding`` job."""

    inputs: tuple[Prompt, ...]
    dimensions: int | None = None
    """Of each vector, the first so many, made unit length again."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One emitted token; ``top`` lists the likeliest at its place as (text, logprob)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished answer of a ``text-generation`` job."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What an upstream's model wrote before its answer, where it keeps that apart."""


# --- Events: what a worker says while a job runs -------------------------------------------------

AUDIO_CHUNK_BYTES_MAX: Final = 16 * 1024
"""Of a ``AudioChunk``, so that no frame of events grows large."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The worker has taken the job up; everything said by an earlier attempt is void."""

    worker: str
    attempt: int


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """New text of one choice, coalesced over any number of tokens; tool calls are whole."""

    index: int
    text: str
    count: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """New text of the choice's reasoning, beside ``text``."""
    usage: Usage | None = None
    """Usage of the request so far, with the first tokens of each choice. For the ledger: if the
    worker is lost, the event log still shows how much input the delivered text took."""


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far one step of a workflow is: its name, its model, and its own steps done of all."""

    name: str
    model: str
    status: Literal["running", "succeeded", "retrying"] = "running"
    step: int = 0
    steps: int = 0
    eta_ms: int | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """Steps done of all steps, with the estimated time left in milliseconds if known."""

    step: int
    steps: int
    eta_ms: int | None = None
    stage: Stage | None = None
    """Of a workflow, said by the gateway: the step that this is about."""


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """A first look at an unfinished output, in the blob store."""

    output: int
    blob: BlobRef
    index: int = 0
    """Which of this output's previews it is."""
    full: bool = False
    """Whether it is a picture at full size, and so a delivery: the output is charged if the request
    ends early. Thumbnails are free."""


class Sketch(msgspec.Struct, frozen=True, tag="sketch"):
    """What an engine says to its agent, which stores the bytes and sends a ``Preview`` instead."""

    output: int
    index: int
    file: File
    full: bool = False
    """As in ``Preview``."""


class AudioChunk(msgspec.Struct, frozen=True, tag="sound"):
    """A piece of an output's sound while it is made, in the format that was asked for.

    The pieces of an attempt, one behind the other, are a whole file. A second attempt with the same
    seed repeats the first, so who has heard ``n`` bytes of an output goes on with what of a piece
    lies beyond them: ``data[max(0, n - start):]``.
    """

    index: int
    """Of the output."""
    start: int
    """Bytes of this output that this attempt has said before."""
    data: bytes
    """At most ``AUDIO_CHUNK_BYTES_MAX``; none where nobody reads along."""
    duration_ms: int
    """Of this output, up to the end of this piece."""
    characters: int = 0
    """Characters of the sentences begun up to the end of this piece, of speech."""


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The request is closed and its charge committed: said by the gateway that settled it."""


Event: TypeAlias = Started | Tokens | Progress | Preview | Sketch | AudioChunk | Settled


class SentEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event in a mailbox frame. ``seq`` counts from 1 within one attempt, without gaps."""

    request_id: RequestId
    attempt: int
    seq: int
    event: Event


# --- Outcomes: how a job ended -------------------------------------------------------------------

FailureCode: TypeAlias = Literal[
    "invalid_input",  # the engine found what the gateway could not: free, the client's to mend
    "context_length_exceeded",
    "unsupported_parameter",
    "model_load_failed",
    "out_of_memory",
    "engine_error",
    "worker_lost",  # three crashes: the job is poison
    "upstream_error",
    "upstream_rejected",
    "upstream_timeout",
    "upstream_unavailable",
    "output_too_large",
]


class Completed(msgspec.Struct, frozen=True, tag="completed", omit_defaults=True):
    """The job ran to its end. ``output`` is small and JSON-like; anything large is a blob.

    For ``text-generation`` it is ``{"choices": [Choice, ...]}``, for ``text-embedding``
    ``{"vectors": [bytes, ...]}``, little-endian float32; for pictures, videos and sound
    ``{"media": [Medium, ...]}``. An engine hands over ``files``; its agent stores them and puts
    ``blobs`` in their place, so none ever travels through the queue.
    """

    usage: Usage
    timings: Timings = Timings()
    output: dict[str, Any] = {}
    blobs: tuple[BlobRef, ...] = ()
    worker: str = ""
    files: tuple[File, ...] = ()
    stored: BlobRef | None = None
    """Location of ``output`` if it is too large for the queue, as ``pack_value`` wrote it;
    ``output`` is then empty."""


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """The job could not be done. ``message`` is for the client: no path, secret or traceback.

    With ``delivered`` a part had been streamed before; ``usage`` is then what that part is charged
    for, and ``output`` and ``blobs`` are the part itself as far as it is known here.
    """

    code: FailureCode
    message: str
    param: str | None = None
    """The input field at fault, where there is one."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    worker: str = ""
    delivered: bool = False
    output: dict[str, Any] = {}
    blobs: tuple[BlobRef, ...] = ()
    stored: BlobRef | None = None
    """As in ``Completed``."""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", omit_defaults=True):
    """The job was stopped. What was produced counts only if it was delivered (a stream).

    ``usage``, ``output`` and ``blobs`` as in ``Failed``.
    """

    reason: Literal["client", "deadline", "operator"]
    delivered: bool = False
    usage: Usage = Usage()
    timings: Timings = Timings()
    output: dict[str, Any] = {}
    worker: str = ""
    blobs: tuple[BlobRef, ...] = ()
    stored: BlobRef | None = None
    """As in ``Completed``."""


Outcome: TypeAlias = Completed | Failed | Cancelled

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)


_value_decoder = msgspec.msgpack.Decoder(dict[str, Any])
VALUE_TYPE: Final = "application/msgpack"


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A sent event whose kind may be one that this version does not know."""

    request_id: RequestId
    attempt: int
    seq: int
    event: msgspec.Raw


_frame_decoder = msgspec.msgpack.Decoder(tuple[_Sent, ...])
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Job | Outcome | tuple[SentEvent, ...]) -> bytes:
    return _encoder.encode(message)


def pack_value(value: dict[str, Any]) -> bytes:
    """Encode an input or an output that goes by the blob store."""
    return _encoder.encode(value)


def unpack_value(data: bytes) -> dict[str, Any]:
    """Raise ``msgspec.DecodeError`` if the bytes are not what ``pack_value`` makes."""
    return _value_decoder.decode(data)


def decode_job(data: bytes) -> Job:
    """Raise ``msgspec.ValidationError`` if the bytes are no job."""
    return _job_decoder.decode(data)


def decode_outcome(data: bytes) -> Outcome:
    """Raise ``msgspec.ValidationError`` if the bytes are no outcome."""
    outcome: Outcome = _outcome_decoder.decode(data)
    return outcome


def decode_frame(data: bytes) -> tuple[SentEvent, ...]:
    """Read a frame of events, leaving out kinds that a newer sender knows and we do not.

    Raise ``msgspec.DecodeError`` if the bytes are no frame.
    """
    events = []
    for sent in _frame_decoder.decode(data):
        try:
            event = _event_decoder.decode(sent.event)
        except msgspec.ValidationError:
            continue
        events.append(SentEvent(sent.request_id, sent.attempt, sent.seq, event))
    return tuple(events)
