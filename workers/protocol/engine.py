"""What the step loop asks of an engine: estimate, admit, step, cancel, release; load and unload.

All calls come from one thread, so an engine needs no lock; only ``prepare`` and what a report puts
off run beside it. The loop times the phases and shares a
step's time out among the requests in it; an engine only says, by weights, how much of the step was
whose. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from workers.contract.jobs import Event, Failed, Job, Outcome, RequestId, Usage

Phase: TypeAlias = Literal["preprocess", "transfer", "forward", "postprocess"]
CancelReason: TypeAlias = Literal["client", "deadline", "operator"]


class PhaseClock(Protocol):
    """Times the phases of the call in which it was handed over; phases do not nest.

    Time outside any phase counts as ``preprocess`` in ``admit`` and as ``forward`` in ``step``. A
    device that works asynchronously is waited for before its phase ends.
    """

    def phase(self, name: Phase) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job will take: device time, and bytes of device memory while it is admitted."""

    device_us: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no room now; ask again after something has ended."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job takes part in steps from now on."""


Admission: TypeAlias = Admitted | Wait | Failed


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """An event or an outcome that is still to be made, which needs no device: a file, say.

    ``make`` runs on another thread, after what was put off before for the same request, and may
    return None for no event. It must touch nothing that a step touches. A request whose outcome is
    put off has left the engine; if it is cancelled meanwhile, it ends with ``usage``.
    """

    make: Callable[[], Event | Outcome | None]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an engine's ``prepare`` has made of a job and its files."""

    value: Any


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    ``weights``: how the step's time is shared out among the requests that took part, any positive
    scale. ``outcomes``: the requests that ended in this step, their usage in the units of the price
    list but for ``gpu_us`` and timings, which the loop fills in. A report in which nothing happened
    says that the engine waits for what it has put off. Token events are reported for
    every request, read along or not: the loop counts and times by them and forwards what is wanted.
    """

    weights: Mapping[RequestId, float]
    events: Sequence[tuple[RequestId, Event | Later]] = field(default_factory=tuple)
    outcomes: Sequence[tuple[RequestId, Outcome | Later]] = field(default_factory=tuple)


@runtime_checkable
class Preparing(Protocol):
    """An engine that reads files before it admits a job, which takes long enough to be put off."""

    def prepare(self, job: Job, files: Sequence[bytes]) -> Any:
        """Read a job's files, for ``admit``; called on another thread while the engine steps."""
        ...


class Engine(Protocol):
    """One loaded model.

    Between ``admit`` and the outcome in a report a request belongs to the engine. An exception from
    ``step`` is the engine's failure: the loop fails all its requests and goes on with the other
    engines. Only running out of memory (``MemoryError``, or torch's error of that name) costs just
    the youngest request; the others must survive being stepped again. After an exception from
    ``admit`` nothing of the request may remain.
    """

    def load(self) -> None:
        """Read weights and warm up; raise with a sentence for the operator if that cannot be."""
        ...

    def unload(self) -> None:
        """Give the memory back. Called only when nothing is admitted."""
        ...

    def estimate(self, job: Job) -> Estimate:
        """Say what the job will take, without taking anything."""
        ...

    def admit(self, job: Job, clock: PhaseClock, files: Any = ()) -> Admission:
        """Check the input and make room. ``Failed`` is the client's fault and final.

        ``files`` are what the job's attachments refer to, bytes read from the store; an engine that
        prepares is given ``Prepared`` instead.
        """
        ...

    def step(self, clock: PhaseClock) -> StepReport:
        """Do one short piece of device work for the requests that are admitted."""
        ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """Let the next report end this request as ``Cancelled``, with what it used so far.

        The loop ends it itself if that report does not.
        """
        ...

    def release(self, request_id: RequestId) -> None:
        """Drop whatever is still kept of a request that was admitted and has ended.

        Called once for each, also for one that the loop ended because the engine failed.
        """
        ...
