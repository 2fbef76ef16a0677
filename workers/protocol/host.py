"""The host protocol: how the agent runs jobs, in an engine process or as calls to an upstream.

A host knows neither queue nor leases. Every submitted job ends in one outcome, except abandoned
jobs and those in a process that crashes.
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
"""Callback for events and outcomes. Events of a request come before its outcome."""


class Host(Protocol):
    def submit(self, jobs: Sequence[JobHandoff]) -> None: ...

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """End a job; its outcome contains the usage so far."""
        ...

    def abandon(self, request_id: RequestId) -> None:
        """End a job without further reports. The same job can be submitted again."""
        ...
