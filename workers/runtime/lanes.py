"""State of the step loop's jobs, by model: waiting, admitted, or finishing in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.contract.delivered import Tally
from workers.contract.jobs import Job, Outcome, RequestId, Usage
from workers.protocol.engine import CancelReason, Deferred, Demand, Engine, Hardware, Prepared
from workers.runtime.step_times import PHASES, TokenTimes


@dataclass(slots=True, eq=False)
class Run:
    """State of one job in the loop; times in microseconds."""

    job: Job
    lane: Lane
    queue_us: int
    leased_us: int
    files: Sequence[bytes] | Prepared
    """Attachments; dropped on admission."""
    preparing: bool = False
    background_pre_us: int = 0
    """Time on other threads before admission."""
    background_post_us: int = 0
    """Time on other threads after admission."""
    cancelled_usage: Usage | None = None
    """Usage if it is cancelled while its outcome is made in the background."""
    load_us: int = 0
    token_times: TokenTimes = field(default_factory=TokenTimes)
    tally: Tally = field(default_factory=Tally)
    """What has been streamed."""
    rows: int = 0
    """Most requests that took part in one of its steps."""
    spent: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    cancelled: CancelReason | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """One engine, its admitted jobs, and those waiting for room or for its weights."""

    model: str
    engine: Engine
    prepares: bool
    loaded: bool = False
    load_started_us: int = 0
    load_ended_us: int = 0
    loads: int = 0
    """Number of times that its weights were loaded."""
    used_us: int = 0
    """End of its last load or job."""
    demand: Demand = field(default_factory=Demand)
    """Memory that it takes: estimated before its first load, measured after it."""
    optional_bytes: int = 0
    """Part of that memory without which it can be loaded again; 0 while it is not loaded."""
    wished: bool = False
    """Whether it is to be loaded without a job."""
    leaving: bool = False
    """Whether it admits no jobs, so that another model gets its memory."""
    broken: str | None = None
    hardware: Hardware = field(default_factory=Hardware)
    busy_us: int = 0
    """Time spent inside its engine."""
    longest_us: int = 0
    """Longest time that its engine kept the others waiting at once."""
    admitted: dict[RequestId, Run] = field(default_factory=dict)
    waiting: deque[Run] = field(default_factory=deque)
    at_capacity: bool = False
    finishing: dict[RequestId, Run] = field(default_factory=dict)
    """Jobs that have left the engine and whose outcome is made in the background."""
    awaits_background: bool = False
    """Whether the engine has nothing to do until deferred work ends."""

    @property
    def is_ready(self) -> bool:
        """Whether its engine has something to do."""
        return bool(self.admitted) and not self.awaits_background

    @property
    def is_busy(self) -> bool:
        """Whether its weights are in use by a running job, or by a job whose files are read."""
        return bool(self.admitted) or any(run.preparing for run in self.waiting)


def as_deferred(outcome: Outcome) -> Deferred:
    """Return an outcome that is known, to be reported after deferred events."""
    return Deferred(lambda: outcome, outcome.usage)
