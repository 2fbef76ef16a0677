"""Messages between agent and engine process: length-prefixed MessagePack on a socket.

Both ends have the same version and run on the same machine, so compatibility does not matter. Times
are in microseconds of the machine's monotonic clock.
"""

from __future__ import annotations

from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from workers.contract.jobs import Event, Job, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.protocol.engine import CancelReason

# --- To the engine process -----------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message: the models, and whether they are loaded before their first job."""

    worker: str
    models: tuple[ModelSpec, ...]
    preload: bool
    budget_bytes: int | None = None
    """Maximum memory of the models on each device. Default: the device's, less a reserve."""


class JobHandoff(msgspec.Struct, frozen=True, array_like=True):
    """A job with its time in the queue, time of lease, attempt and attachments."""

    job: Job
    queue_us: int
    leased_us: int
    attempt: int = 1
    files: tuple[bytes, ...] = ()
    note: str = ""
    """Note stored by an earlier holder of the job."""


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    jobs: tuple[JobHandoff, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    reason: CancelReason


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Return the jobs that have not started."""


class AddModel(msgspec.Struct, frozen=True, tag="add"):
    """Serve another model."""

    model: ModelSpec


class RemoveModel(msgspec.Struct, frozen=True, tag="remove"):
    """Free a model. It has no jobs."""

    model: str


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """Load a model now that would be loaded for its first job."""

    model: str


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Report what the process has done, and its memory."""


Command: TypeAlias = (
    Configure | Admit | Cancel | Withdraw | AddModel | RemoveModel | LoadModel | Measure
)


# --- From the engine process ---------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process takes jobs: with ``preload`` of models that it has loaded, else of all."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """No other report follows until the weights of this model are loaded."""

    model: str


class KeepAlive(msgspec.Struct, frozen=True, tag="moving"):
    """A keep-alive during a long step."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    model: str
    problem: str | None = None
    """Reason why loading failed, for the operator."""
    device: str = ""
    """Name of the device that the model runs on, such as ``NVIDIA H200``."""
    dtype: str = ""
    """Precision of its weights."""


class Unloaded(msgspec.Struct, frozen=True, tag="unloaded"):
    """A model is not in memory for lack of room; it is loaded for its next job."""

    model: str


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Jobs that were removed from the process before they started."""

    request_ids: tuple[RequestId, ...]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """Result of one turn of the loop; also serves as keep-alive. At most one per step."""

    busy_us: int
    """Busy time since the process started."""
    events: tuple[tuple[RequestId, Event], ...] = ()
    outcomes: tuple[tuple[RequestId, Outcome], ...] = ()


class ModelMeasures(msgspec.Struct, frozen=True, array_like=True):
    """A model's busy time since it was added, and its memory now."""

    busy_us: int
    weights_bytes: int = 0
    cache_bytes: int = 0
    used_ms: int = 0
    """End of its last load or job in Unix milliseconds; 0 if it was never loaded."""
    loads: int = 0
    """Number of times that it was loaded."""
    load_us: int = 0
    """Duration of its last load."""
    resident_bytes: int = 0
    """Memory that it counts for while it is loaded: weights, cache and what else its load took."""
    longest_us: int = 0
    """Longest step since it was added."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The process's work since it started, and the memory of its device."""

    busy_us: int = 0
    steps: int = 0
    bytes_total: int = 0
    bytes_used: int = 0
    budget_bytes: int = 0
    """Maximum memory of its models; 0 if there is no limit."""
    models: dict[str, ModelMeasures] = {}


Report: TypeAlias = Ready | Loading | Loaded | Unloaded | KeepAlive | Stepped | Withdrawn | Measured

# --- Framing -------------------------------------------------------------------------------------

_PREFIX_BYTES: Final = 4
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")


def pack(message: Command | Report) -> bytes:
    """Encode a message with its length as prefix."""
    frame = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, frame, _PREFIX_BYTES)
    frame[:_PREFIX_BYTES] = (len(frame) - _PREFIX_BYTES).to_bytes(_PREFIX_BYTES, "little")
    return bytes(frame)


class Unpacker(Generic[MessageT]):
    """Splits a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def is_midway(self) -> bool:
        """Whether a message has been received in part."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[MessageT]:
        buffer = self._buffer
        buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(buffer) - start >= _PREFIX_BYTES:
            body = start + _PREFIX_BYTES
            end = body + int.from_bytes(buffer[start:body], "little")
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                messages.append(self._decoder.decode(view[body:end]))
            start = end
        del buffer[:start]
        return messages


def command_unpacker() -> Unpacker[Command]:
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    return Unpacker(decoder)


def report_unpacker() -> Unpacker[Report]:
    decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
    return Unpacker(decoder)
