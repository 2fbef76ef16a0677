"""How to talk to an upstream: one module per dialect, all with the same two questions.

A dialect knows the wire format of somebody else's service; it knows no queue, lease or price.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from workers.contract.jobs import Completed, Event, Failed, Job, Usage
from workers.contract.models import ModelSpec
from workers.protocol.engine import PhaseClock
from workers.upstreams.endpoints import usable
from workers.upstreams.gmi import Gmi
from workers.upstreams.notes import NO_NOTES, Notes
from workers.upstreams.openai import OpenAI

SendEvent: TypeAlias = Callable[[Event], None]


class Call(Protocol):
    """One job at an upstream. Cancelling ``run`` hangs up."""

    async def run(self, clock: PhaseClock) -> Completed | Failed:
        """Have the job done. Phases: ``transfer`` until the answer begins, then ``forward``."""
        ...

    async def handover_ready(self) -> None:
        """Wait until another worker could take the job over without ordering anything twice."""
        ...

    def stop(self) -> None:
        """Call off what was ordered: the job has been cancelled, or its deadline has passed.

        A job whose ``run`` is cancelled without this is followed by another worker.
        """
        ...

    def partial_result(self) -> tuple[Usage, dict[str, Any]]:
        """What has been used and said up to now, for a job that is cancelled."""
        ...


class Dialect(Protocol):
    def call(
        self, job: Job, send_event: SendEvent, files: Sequence[bytes] = (), notes: Notes = NO_NOTES
    ) -> Call:
        """Prepare a job; ``say`` takes the events of its answer, ``files`` are its attachments,
        ``notes`` is what is kept of its order."""
        ...

    @property
    def is_down(self) -> bool:
        """Whether nobody there takes work at present."""
        ...

    def close(self) -> Awaitable[None]: ...


class _Kind(Protocol):
    """What makes the client of an entry."""

    def __call__(self, spec: ModelSpec, environ: Mapping[str, str]) -> Dialect: ...

    def read_options(self, spec: ModelSpec) -> object: ...


DIALECTS: Final[Mapping[str, _Kind]] = {"openai": OpenAI, "gmi": Gmi}


def obstacle(spec: ModelSpec, environ: Mapping[str, str]) -> str | None:
    """Say in a sentence why this worker cannot reach the upstream of an entry, if so."""
    assert spec.upstream is not None
    if spec.upstream.dialect not in DIALECTS:
        return (
            f"this worker has no adapter for the dialect {spec.upstream.dialect!r}; "
            f"it has {', '.join(DIALECTS)}"
        )
    if not usable(spec.upstream, environ):
        missing = dict.fromkeys(place.credential for place in spec.upstream.places)
        return f"{', '.join(filter(None, missing))} is not set"
    try:
        DIALECTS[spec.upstream.dialect].read_options(spec)
    except ValueError as error:
        return str(error)
    return None


def connect(spec: ModelSpec, environ: Mapping[str, str]) -> Dialect:
    """Make the client of an entry that has no obstacle."""
    assert spec.upstream is not None
    return DIALECTS[spec.upstream.dialect](spec, environ)
