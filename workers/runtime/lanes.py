"""What the step loop knows of the jobs in it, by model: who waits, steps, or has files made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.contract.delivered import Tally
from workers.contract.jobs import Job, RequestId, Usage
from workers.protocol.engine import CancelReason, Engine, Prepared
from workers.runtime.metering import PHASES, TokenTimes


@dataclass(slots=True, eq=False)
class Run:
    """One job on its way through the loop; times in microseconds."""

    job: Job
    lane: Lane
    queue_us: int
    leased_us: int
    files: Sequence[bytes] | Prepared
    """Until it is admitted."""
    preparing: bool = False
    background_pre_us: int = 0
    """Time on other threads before it was admitted."""
    background_post_us: int = 0
    """And after that."""
    cancelled_usage: Usage | None = None
    """What it used, once the device has done its part."""
    load_us: int = 0
    token_times: TokenTimes = field(default_factory=TokenTimes)
    tally: Tally = field(default_factory=Tally)
    """What was streamed of it."""
    spent: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    cancelled: CancelReason | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """One engine, those it has admitted, and the line of those that wait for room or weights."""

    model: str
    engine: Engine
    prepares: bool
    loaded: bool = False
    load_started_us: int = 0
    load_ended_us: int = 0
    broken: str | None = None
    admitted: dict[RequestId, Run] = field(default_factory=dict)
    waiting: deque[Run] = field(default_factory=deque)
    at_capacity: bool = False
    finishing: dict[RequestId, Run] = field(default_factory=dict)
    """Those that have left the engine, and whose files are being made."""
    awaits_background: bool = False
    """Whether the engine waits for what it has put off."""
