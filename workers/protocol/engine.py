"""The engine protocol of the step loop: admit, step, cancel, release; load and unload.

All calls come from one thread, so an engine needs no lock; only ``prepare`` and deferred work run
on other threads. The loop times the phases and divides the time of a step among its requests; the
engine only reports their weights. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from workers.contract.jobs import Event, Failed, Job, Outcome, RequestId, Usage

Phase: TypeAlias = Literal["preprocess", "transfer", "forward", "postprocess"]
CancelReason: TypeAlias = Literal["client", "deadline", "operator"]


class PhaseClock(Protocol):
    """Times the phases of the call it is passed to; phases do not nest.

    Time outside any phase counts as ``preprocess`` in ``admit`` and as ``forward`` in ``step``.
    Synchronise an asynchronous device before its phase ends.
    """

    alone: bool
    """Whether no other engine has running requests, so that a step may leave work enqueued."""

    def phase(self, name: Phase) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no room now; try again after another request has ended."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job is admitted and takes part in the following steps."""


Admission: TypeAlias = Admitted | Wait | Failed


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """Deferred events or an outcome whose creation needs no device, such as encoding a file.

    ``make`` runs on another thread, after earlier deferred work of the same request; it returns an
    event, a list of them, or None for no event. It must not touch state that a step uses. A request
    whose outcome is deferred has left the engine; if it is cancelled meanwhile, it ends with
    ``usage``.
    """

    make: Callable[[], Event | list[Event] | Outcome | None]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of an engine's ``prepare``."""

    value: Any


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one step.

    ``weights``: by which the step's time is divided among the requests that took part, on any
    positive scale. ``outcomes``: requests that ended in this step, with usage in the units of the
    price list; the loop fills in ``gpu_us`` and the timings. An empty report means that the engine
    waits for deferred work. Token events are reported for every request, streamed or not: the loop
    counts and times tokens by them, and forwards only those of streamed requests.
    """

    weights: Mapping[RequestId, float]
    events: Sequence[tuple[RequestId, Event | Deferred]] = field(default_factory=tuple)
    outcomes: Sequence[tuple[RequestId, Outcome | Deferred]] = field(default_factory=tuple)
    preprocess: Mapping[RequestId, float] = field(default_factory=dict)
    """Weights of the phase ``preprocess`` if they differ, as when a request is only prepared."""


@runtime_checkable
class Preparing(Protocol):
    """An engine that reads files before admission, which is slow enough to be deferred."""

    def prepare(self, job: Job, files: Sequence[bytes]) -> Any:
        """Read a job's files for ``admit``. Called on another thread while the engine steps."""
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device of an engine, such as ``NVIDIA H200``, and the precision of its weights."""

    device: str = "cpu"
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is known of a model before it is loaded."""

    notes: tuple[str, ...] = ()
    """What the operator should know, though the model can be loaded."""
    device: str = ""
    memory_bytes: int | None = None
    """Memory of the device; None if it is unknown."""
    cache_bytes: int = 0
    """Memory that it takes beside its weights."""


@runtime_checkable
class Inspecting(Protocol):
    """An engine that can check its checkpoint without reading the weights."""

    def inspect(self) -> Inspected:
        """Raise ``ValueError`` as ``load`` would."""
        ...


@runtime_checkable
class Placed(Protocol):
    """An engine that can tell where its weights are once they are loaded."""

    @property
    def hardware(self) -> Hardware: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a loaded model, and of its device; a device's is 0 if the process's counts."""

    weights_bytes: int = 0
    cache_bytes: int = 0
    device_bytes: int = 0
    device_used_bytes: int = 0
    optional_bytes: int = 0
    """Part of these without which the model can be loaded."""
    host_bytes: int = 0
    """Memory of the host that a model on another device occupies, pinned."""


@runtime_checkable
class Weighed(Protocol):
    """An engine that can tell how much memory its model takes once it is loaded."""

    @property
    def memory(self) -> Memory: ...


class Demand(NamedTuple):
    """Memory that a model takes on a device, and the most that all models on it can take."""

    device: str = ""
    bytes: int = 0
    budget_bytes: int | None = None
    """None: no limit is known."""
    host_bytes: int = 0
    """Memory of the host that a model on another device occupies. 0 until it is measured: what is
    parked there depends on the room that it gets."""
    host_budget_bytes: int | None = None


@runtime_checkable
class Sized(Protocol):
    """An engine that can estimate the memory of its model before it is loaded."""

    def demand(self) -> Demand:
        """Estimate the memory from the checkpoint, without reading the weights."""
        ...


@runtime_checkable
class Elastic(Protocol):
    """An engine whose model takes more memory than its ``demand`` if there is room."""

    def allow(self, memory_bytes: int | None) -> None:
        """Set the maximum memory of the next load; None if no limit is known."""
        ...


class Engine(Protocol):
    """One model, in memory or not.

    A request belongs to the engine from ``admit`` until a report contains its outcome. If ``step``
    raises, the loop fails all requests of the engine and continues with the other engines. Only out
    of memory (``MemoryError``, or torch's equivalent) fails just the youngest request; the engine
    must be able to step the others again. If ``admit`` raises, no state of the request may remain.
    """

    def load(self) -> None:
        """Read weights and warm up. Raise with a message for the operator if that fails.

        Called again after ``unload``, as often as the model is wanted.
        """
        ...

    def unload(self) -> None:
        """Free the memory. Called only while no request is admitted."""
        ...

    def admit(self, job: Job, clock: PhaseClock, files: Any = ()) -> Admission:
        """Check the input and reserve room. ``Failed`` is final and means invalid input.

        ``files`` are the contents of the job's attachments; a ``Preparing`` engine receives
        ``Prepared`` instead.
        """
        ...

    def step(self, clock: PhaseClock) -> StepReport:
        """Run one short step of device work for the admitted requests."""
        ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """End this request as ``Cancelled`` in the next report, with its usage so far.

        If that report does not contain the outcome, the loop ends the request itself.
        """
        ...

    def release(self, request_id: RequestId) -> None:
        """Drop the state of an admitted request that has ended.

        Called once per request, including those that the loop ended because the engine failed.
        """
        ...
