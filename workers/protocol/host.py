"""What runs a model for the agent: the engine process for its engines, a task for an upstream.

A host knows no queue and no lease. Every job that was submitted ends in one outcome, except those
that are abandoned and those that are in a process when it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from workers.contract.jobs import Event, Outcome, RequestId
from workers.protocol.engine import CancelReason
from workers.protocol.ipc import JobHandoff

Report: TypeAlias = Callable[
    [Sequence[tuple[RequestId, Event]], Sequence[tuple[RequestId, Outcome]]], None
]
"""How a host tells its agent what happened. Events of a request come before its outcome."""


class Host(Protocol):
    def submit(self, jobs: Sequence[JobHandoff]) -> None: ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """End a job with what it used so far; it says so in its outcome."""
        ...

    def abandon(self, request_id: RequestId) -> None:
        """End a job and say nothing more about it; the same one may be submitted again."""
        ...
