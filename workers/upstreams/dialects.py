"""The dialects of upstreams: one module each, behind a common interface.

A dialect knows the wire format of a service, but neither queue nor leases nor prices. Its module is
imported only by a worker that serves an upstream's model, because HTTP clients and codecs take
longer to import than the rest of the agent.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from workers.contract.jobs import Completed, Event, Failed, Job, Usage
from workers.contract.models import ModelSpec
from workers.protocol.engine import PhaseClock
from workers.upstreams.notes import NO_NOTES, Notes

if TYPE_CHECKING:  # it imports an HTTP client
    from workers.upstreams.endpoints import Endpoints

SendEvent: TypeAlias = Callable[[Event], None]


class Call(Protocol):
    """One job at an upstream. Cancelling ``run`` closes the connection."""

    async def run(self, clock: PhaseClock) -> Completed | Failed:
        """Execute the job. Phases: ``transfer`` until the response starts, then ``forward``."""
        ...

    @property
    def endpoint(self) -> str:
        """Host of the endpoint that received the job, or an empty string."""
        ...

    @property
    def served_by(self) -> str:
        """Label of that endpoint if there are several, or an empty string."""
        ...

    async def handover_ready(self) -> None:
        """Wait until another worker can take over the job without submitting it twice."""
        ...

    def stop(self) -> None:
        """Cancel the job at the upstream, because it was cancelled or its deadline has passed.

        If ``run`` is cancelled without this call, another worker continues the job.
        """
        ...

    def partial_result(self) -> tuple[Usage, dict[str, Any]]:
        """Return usage and output so far, for a cancelled job."""
        ...


class Dialect(Protocol):
    endpoints: Endpoints

    def call(
        self, job: Job, send_event: SendEvent, files: Sequence[bytes] = (), notes: Notes = NO_NOTES
    ) -> Call:
        """Prepare a job. ``send_event`` receives its events, ``files`` are its attachments, and
        ``notes`` stores the state of its upstream request."""
        ...

    @property
    def is_down(self) -> bool:
        """Whether no endpoint accepts work now."""
        ...

    def close(self) -> Awaitable[None]: ...


class _Kind(Protocol):
    """Factory of the client of a catalog entry."""

    def __call__(self, spec: ModelSpec, environ: Mapping[str, str]) -> Dialect: ...

    def read_options(self, spec: ModelSpec) -> object: ...


DIALECTS: Final = {"openai": "workers.upstreams.openai:OpenAI", "gmi": "workers.upstreams.gmi:Gmi"}
"""Where the client of each dialect is."""


def obstacle(spec: ModelSpec, environ: Mapping[str, str]) -> str | None:
    """Return the reason why this worker cannot serve an entry, or None."""
    assert spec.upstream is not None
    if spec.upstream.dialect not in DIALECTS:
        return (
            f"unknown dialect {spec.upstream.dialect!r}; this worker supports {', '.join(DIALECTS)}"
        )
    if spec.upstream.command is not None and spec.upstream.dialect != "openai":
        return "a server that the worker starts is called in the dialect openai"
    if not spec.upstream.usable(environ):
        missing = dict.fromkeys(each.credential for each in spec.upstream.all_endpoints)
        return f"{', '.join(filter(None, missing))} is not set"
    try:
        _kind(spec.upstream.dialect).read_options(spec)
    except ValueError as error:
        return str(error)
    return None


def connect(spec: ModelSpec, environ: Mapping[str, str]) -> Dialect:
    """Create the client of an entry without an obstacle."""
    assert spec.upstream is not None
    return _kind(spec.upstream.dialect)(spec, environ)


def _kind(dialect: str) -> _Kind:
    module, _, name = DIALECTS[dialect].partition(":")
    found: _Kind = getattr(importlib.import_module(module), name)
    return found
