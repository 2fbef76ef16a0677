"""What an agent and its engine process say to each other: length-prefixed MessagePack on a socket.

Both ends are the same version on the same machine, so nothing here is kept compatible. Times are
microseconds of the machine's monotonic clock, which both processes read.
"""

from __future__ import annotations

from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from workers.contract.jobs import Event, Job, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.protocol.engine import CancelReason

# --- To the engine process -----------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message: whom to serve, and whether the weights are read before the first job."""

    worker: str
    models: tuple[ModelSpec, ...]
    preload: bool


class JobHandoff(msgspec.Struct, frozen=True, array_like=True):
    """A job, how long it was queued, when it was leased, for which time, and its attachments."""

    job: Job
    queue_us: int
    leased_us: int
    attempt: int = 1
    files: tuple[bytes, ...] = ()
    note: str = ""
    """What an earlier holder of the job kept for this one."""


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    jobs: tuple[JobHandoff, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    reason: CancelReason


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Give back the jobs that have not begun."""


Command: TypeAlias = Configure | Admit | Cancel | Withdraw


# --- From the engine process ---------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Everything that was to be loaded is loaded, or known to be broken."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Nothing else will be heard until the weights of this model are there."""

    model: str


class Moving(msgspec.Struct, frozen=True, tag="moving"):
    """A sign of progress within a step that takes long."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    model: str
    problem: str | None = None
    """Why it could not be loaded, for the operator."""


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Jobs that are not in the process any more, and of which nothing was done."""

    request_ids: tuple[RequestId, ...]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One turn of the loop; also the sign that it moves. At most one a step."""

    busy_us: int
    """Since the process began."""
    events: tuple[tuple[RequestId, Event], ...] = ()
    outcomes: tuple[tuple[RequestId, Outcome], ...] = ()


Report: TypeAlias = Ready | Loading | Loaded | Moving | Stepped | Withdrawn

# --- Framing -------------------------------------------------------------------------------------

_PREFIX_BYTES: Final = 4
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")


def pack(message: Command | Report) -> bytes:
    """One message with its length in front of it."""
    frame = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, frame, _PREFIX_BYTES)
    frame[:_PREFIX_BYTES] = (len(frame) - _PREFIX_BYTES).to_bytes(_PREFIX_BYTES, "little")
    return bytes(frame)


class Unpacker(Generic[MessageT]):
    """Cuts a stream of bytes into messages, however it arrives."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @property
    def is_midway(self) -> bool:
        """Whether a message has begun and not ended."""
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
