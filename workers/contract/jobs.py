"""The messages between gateway and workers: jobs, events and outcomes, with usage and timings.

All are immutable msgspec structs in MessagePack. Unknown fields are ignored, a new field has a
default, a type never changes: the bytes recorded in ``tests/contract`` must always decode. Knows
neither queue nor engines nor money.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, Literal, NewType, TypeAlias

import msgspec

from workers.contract.attempts import RunDetails, UnreadResult
from workers.contract.media import File

RequestId = NewType("RequestId", str)
"""``req_`` and the 32 hexadecimal digits of a UUID version 7, assigned by the gateway."""

VERSION: Final = 1
"""Version of the wire format; raised only if an old reader could not read a new message."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured quantities, in the units of the price list; also the limits of a request.

    The token counts are disjoint: an input token is either cached or not, never counted twice.
    ``characters`` are counted by ``media.characters``; ``audio_ms`` is the audio delivered.
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
        """All tokens: input, cached input and output."""
        return self.input_tokens + self.cached_input_tokens + self.output_tokens


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Timings of one request, in microseconds of a monotonic clock.

    ``queue_us`` is the time from enqueueing to lease, ``load_us`` the time spent waiting for
    weights to load. The four phases are this request's share of its batches. ``first_token_us`` is
    the time from enqueueing to the first token (TTFT) or the first audio (TTFA). After that,
    ``per_token_us`` is the mean time between two tokens of one choice, and ``gap_us`` the longest
    interval without output. ``total_us`` is measured by the gateway, from acceptance to settlement.
    ``drafted`` counts draft tokens, ``accepted`` those that the model accepted.
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
    """Reference to an input or output in the blob store; ``sha256`` is hexadecimal."""

    key: str
    bytes: int
    sha256: str
    content_type: str = "application/octet-stream"


class PromptWarning(msgspec.Struct, frozen=True):
    """Words of a text that the model does not know, and those that it knows."""

    field: str
    """The input's field with the text, as the client's body names it."""
    unknown: tuple[str, ...]
    known: tuple[str, ...]


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request as the queue carries it, validated and with a hold."""

    request_id: RequestId
    account_id: str
    model: str
    task: str
    input: dict[str, Any]
    """The task's input as checked by the gateway; for ``text-generation`` see ``ChatInput``."""
    limits: Usage = Usage()
    """Maximum usage; the hold covers exactly this."""
    stream: bool = False
    """Whether events are sent; what was streamed counts as delivered if the request ends early."""
    deadline_ms: int = 0
    """Unix time in milliseconds; 0 means none."""
    attachments: tuple[BlobRef, ...] = ()
    gateway_note: str = ""
    """Private note of the gateway, which it reads when the request ends."""
    priority: int = 0
    """Priority within an engine: higher runs first; batches are below 0."""
    stored_under: RequestId | None = None
    """For a step of a workflow: the request under whose id the outputs are stored."""
    workflow: bool = False
    """Used by the gateway only, never queued: ``input`` is a plan of steps, each a separate job."""
    version: int = VERSION
    note: str = ""
    """Note of an earlier holder of the job, as far as the gateway knows it; the lease's note is
    newer. See ``Queue.keep_note``."""
    stored_input: BlobRef | None = None
    """Location of ``input`` if it is too large for the queue, as ``pack_value`` wrote it; ``input``
    is then empty. Deleted when the request ends."""
    sticky_key: str = ""
    """Jobs with the same key are run by the same version of a model. Default: the id."""
    warnings: tuple[PromptWarning, ...] = ()
    """Used by the gateway only, which shows them with the output."""

    @property
    def drawn_by(self) -> str:
        """The key that chooses one of several versions."""
        return self.sticky_key or self.request_id


class ToolCall(msgspec.Struct, frozen=True):
    """A function call requested by the model; ``arguments`` is JSON as the model generated it."""

    id: str
    name: str
    arguments: str


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. The gateway joins the texts of the client's message to ``content``."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[str | int, ...] = ()
    """Texts and pictures in order, as numbers of attachments; empty without pictures."""


Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or the model's own token ids."""
ToolChoice: TypeAlias = Literal["auto", "none", "required"]


class ChatInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a ``text-generation`` job. The gateway always sets ``seed``.

    With a seed, a second attempt after a crash repeats the first, so a stream can resume where it
    stopped. Either a conversation (``messages``) is answered, or each of ``prompts`` is continued
    verbatim; choice ``i`` of prompt ``p`` then has index ``p * n + i``.
    """

    messages: tuple[ChatMessage, ...]
    max_tokens: int
    """Maximum number of tokens of each choice."""
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    """Whether the text of a choice starts with its prompt; only for ``prompts``."""
    seed: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
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
    """Name of the function that must be called."""
    parallel_tool_calls: bool = True

    @property
    def choices(self) -> int:
        """Total number of choices."""
        return self.n * max(1, len(self.prompts))


class EmbeddingInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a ``text-embedding`` job."""

    inputs: tuple[Prompt, ...]
    dimensions: int | None = None
    """Length to which each vector is cut before it is normalised to unit length."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One emitted token; ``top`` lists the most likely alternatives as (text, logprob)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completed choice of a ``text-generation`` job."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Thoughts before the answer, which are not part of its text."""
    reasoning_tokens: int = 0
    """How many of the choice's output tokens they took, if that was counted."""


# --- Events: reported while a job runs -----------------------------------------------------------

AUDIO_CHUNK_BYTES_MAX: Final = 16 * 1024
"""Maximum size of the data of an ``AudioChunk``, which keeps event frames small."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The worker has started the job; events of earlier attempts are void."""

    worker: str
    attempt: int


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """New text of one choice, of any number of tokens; tool calls are complete."""

    index: int
    text: str
    count: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """New text of the choice's reasoning, beside ``text``."""
    usage: Usage | None = None
    """Usage of the request so far, in the first event of each choice. If the worker is lost, the
    ledger takes the input usage of the delivered text from it."""


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of one workflow step: its name, its model, and its completed and total steps."""

    name: str
    model: str
    status: Literal["running", "succeeded", "retrying"] = "running"
    step: int = 0
    steps: int = 0
    eta_ms: int | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """Completed and total steps; ``eta_ms`` is the estimated remaining time, if known."""

    step: int
    steps: int
    eta_ms: int | None = None
    stage: Stage | None = None
    """The workflow step concerned; set by the gateway."""


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """A preview of an unfinished output, in the blob store."""

    output: int
    blob: BlobRef
    index: int = 0
    """Number of the preview, counted per output."""
    full: bool = False
    """Whether it is a full-size image, which counts as delivered: the output is charged even if the
    request ends early. Thumbnails are free."""


class Sketch(msgspec.Struct, frozen=True, tag="sketch"):
    """A preview on its way from engine to agent, which stores it and sends a ``Preview``."""

    output: int
    index: int
    file: File
    full: bool = False
    """As in ``Preview``."""


class AudioChunk(msgspec.Struct, frozen=True, tag="sound"):
    """A chunk of an output's audio in the requested format.

    The chunks of one attempt, concatenated, form a complete file. A second attempt with the same
    seed repeats the first, so a client that has received ``n`` bytes of an output continues with
    ``data[max(0, n - start):]``.
    """

    index: int
    """Index of the output."""
    start: int
    """Byte offset of ``data`` in the output file."""
    data: bytes
    """Encoded audio, at most ``AUDIO_CHUNK_BYTES_MAX`` bytes; empty if the request is not
    streamed."""
    duration_ms: int
    """Duration of this output up to the end of this chunk."""
    characters: int = 0
    """For speech: characters of the sentences started before the end of this chunk."""


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The request is closed and its charge committed; sent by the gateway that settled it."""


Event: TypeAlias = Started | Tokens | Progress | Preview | Sketch | AudioChunk | Settled


class SentEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event in a mailbox frame. ``seq`` counts from 1 within one attempt, without gaps."""

    request_id: RequestId
    attempt: int
    seq: int
    event: Event


# --- Outcomes: how a job ended -------------------------------------------------------------------

FailureCode: TypeAlias = Literal[
    "invalid_input",  # found by the engine, not by the gateway: not charged
    "context_length_exceeded",
    "unsupported_parameter",
    "model_load_failed",
    "out_of_memory",
    "engine_error",
    "worker_lost",  # poison job: three crashes
    "upstream_error",
    "upstream_rejected",
    "upstream_timeout",
    "upstream_unavailable",
    "output_too_large",
]


class Completed(msgspec.Struct, frozen=True, tag="completed", omit_defaults=True):
    """The job has completed. ``output`` is small and JSON-like; anything large is a blob.

    For ``text-generation`` it is ``{"choices": [Choice, ...]}``, for ``text-embedding``
    ``{"vectors": [bytes, ...]}``, little-endian float32, for ``rerank`` ``{"scores": [float,
    ...]}`` in the order of the documents; for images, video and audio ``{"media":
    [Medium, ...]}``. An engine returns ``files``; its agent stores them and replaces them by
    ``blobs``, so that no file passes through the queue.
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
    details: RunDetails | None = None
    unread: UnreadResult | None = None
    """The upstream's result, if a part of it could not be read or stored."""


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """The job has failed. ``message`` is for the client: no path, secret or traceback.

    With ``delivered``, a part had been streamed before; ``usage`` is then the usage charged for it,
    and ``output`` and ``blobs`` contain the part as far as it is known here.
    """

    code: FailureCode
    message: str
    param: str | None = None
    """The invalid input field, if any."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    worker: str = ""
    delivered: bool = False
    output: dict[str, Any] = {}
    blobs: tuple[BlobRef, ...] = ()
    stored: BlobRef | None = None
    """As in ``Completed``."""
    details: RunDetails | None = None
    unread: UnreadResult | None = None
    """The upstream's result that could not be read; it is not charged."""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", omit_defaults=True):
    """The job was cancelled. Its output is charged only if it was delivered (streamed).

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
    details: RunDetails | None = None


Outcome: TypeAlias = Completed | Failed | Cancelled

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)
_value_decoder = msgspec.msgpack.Decoder(dict[str, Any])
VALUE_TYPE: Final = "application/msgpack"


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A sent event of a kind that this version may not know."""

    request_id: RequestId
    attempt: int
    seq: int
    event: msgspec.Raw


_frame_decoder = msgspec.msgpack.Decoder(tuple[SentEvent, ...])
_tolerant_decoder = msgspec.msgpack.Decoder(tuple[_Sent, ...])
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Job | Outcome | tuple[SentEvent, ...]) -> bytes:
    return _encoder.encode(message)


def pack_value(value: dict[str, Any]) -> bytes:
    """Encode an input or output for the blob store."""
    return _encoder.encode(value)


def unpack_value(data: bytes) -> dict[str, Any]:
    """Decode a value of ``pack_value``. Raise ``msgspec.DecodeError``."""
    return _value_decoder.decode(data)


def decode_job(data: bytes) -> Job:
    """Decode a job. Raise ``msgspec.DecodeError``."""
    return _job_decoder.decode(data)


def decode_outcome(data: bytes) -> Outcome:
    """Decode an outcome. Raise ``msgspec.DecodeError``."""
    outcome: Outcome = _outcome_decoder.decode(data)
    return outcome


def decode_frame(data: bytes) -> tuple[SentEvent, ...]:
    """Decode a frame of events, skipping kinds that this version does not know.

    Raise ``msgspec.DecodeError`` if the frame is malformed.
    """
    with contextlib.suppress(msgspec.ValidationError):
        return _frame_decoder.decode(data)
    events = []
    for sent in _tolerant_decoder.decode(data):
        try:
            event = _event_decoder.decode(sent.event)
        except msgspec.ValidationError:
            continue
        events.append(SentEvent(sent.request_id, sent.attempt, sent.seq, event))
    return tuple(events)
