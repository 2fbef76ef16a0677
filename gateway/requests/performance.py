"""How fast requests were answered: of one, and of a model over a time. Reads receipts only.

- **TTFT**, time to first token: from the queue's taking a request to its first token; waiting,
  loading and reading the prompt are in it.
- **TPOT**, time per output token: the mean time from one token to the next of one answer.
- **Gap**: the longest time between two tokens, which is what a reader notices.
- **Queue**: from the queue's taking a request to a worker's. **Total**: from acceptance to charge.
- **Goodput**: requests that succeeded within every bound that the catalog entry promises (its
  ``slo``), as a share of all that ended and for each second.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sqlalchemy import Connection, select

from gateway.catalog.schema import Slo
from gateway.database import Database
from gateway.tables import receipts
from workers.contract.jobs import Timings

Window: TypeAlias = Literal["15m", "1h", "24h"]
WINDOWS: Final[Mapping[Window, timedelta]] = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
}
NEWEST: Final = 10_000
"""At most so many receipts are looked at, the newest."""
ENOUGH: Final = 5
"""Of fewer that succeeded nothing is told but how many there were: no aggregate shows just one."""
KEPT_S: Final = 5.0
PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one receipt, what counts here."""

    status: str
    reason: str
    timings: Timings
    settled_at: datetime
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0


def missed(slo: Slo, timings: Timings) -> str | None:
    """Name the first bound that a request did not keep; None if it kept them all."""
    for name, bound_ms, took_us in (
        ("ttft_ms", slo.ttft_ms, timings.first_token_us),
        ("tpot_ms", slo.tpot_ms, timings.per_token_us),
        ("total_ms", slo.total_ms, timings.total_us),
    ):
        if bound_ms is not None and took_us > bound_ms * 1000:
            return name
    return None


def performance_view(timings: Timings, slo: Slo | None, *, succeeded: bool) -> dict[str, Any]:
    """The part of a receipt about speed; what a request did not have is null."""
    per_token_us = timings.per_token_us
    view: dict[str, Any] = {
        "ttft_ms": _ms(timings.first_token_us),
        "tpot_ms": _ms(per_token_us),
        "longest_gap_ms": _ms(timings.gap_us),
        "tokens_per_second": round(1e6 / per_token_us, 1) if per_token_us else None,
        "slo": None,
        "speculation": None,
    }
    if slo is not None:
        bound = missed(slo, timings)
        view["slo"] = {
            **slo.model_dump(exclude_none=True),
            "met": succeeded and bound is None,
            "missed": bound,
        }
    if timings.drafted:
        view["speculation"] = {
            "drafted": timings.drafted,
            "accepted": timings.accepted,
            "rate": round(timings.accepted / timings.drafted, 3),
        }
    return view


class Performance:
    """Of models over a time; what was asked for is kept for a few seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[tuple[str, Window], tuple[float, dict[str, Any]]] = {}

    async def stats(self, model: str, slo: Slo | None, window: Window) -> dict[str, Any]:
        kept = self._kept.get((model, window))
        if kept is not None and time.monotonic() - kept[0] < KEPT_S:
            return kept[1]
        since = datetime.now(UTC) - WINDOWS[window]
        seen = await self._database.read(lambda connection: read_seen(connection, model, since))
        if len(seen) >= NEWEST:
            since = seen[-1].settled_at
        view = {"object": "model.stats", "model": model, "window": window}
        view |= summarize(seen, slo, (datetime.now(UTC) - since).total_seconds())
        self._kept[model, window] = time.monotonic(), view
        return view


def read_seen(connection: Connection, model: str, since: datetime) -> list[Seen]:
    """The newest receipts of a model since a time. Batches were promised a day and no more."""
    columns = (
        receipts.c.status,
        receipts.c.reason,
        receipts.c.timings,
        receipts.c.settled_at,
        receipts.c.input_tokens,
        receipts.c.cached_input_tokens,
        receipts.c.output_tokens,
    )
    rows = connection.execute(
        select(*columns)
        .where(
            receipts.c.settled_at >= since,
            receipts.c.model == model,
            receipts.c.service_class == "standard",
        )
        .order_by(receipts.c.settled_at.desc())
        .limit(NEWEST)
    )
    return [Seen(row[0], row[1], msgspec.convert(row[2], Timings), *row[3:]) for row in rows]


def summarize(seen: Sequence[Seen], slo: Slo | None, seconds: float) -> dict[str, Any]:
    """Aggregate receipts of a span of so many seconds."""
    done = [one for one in seen if one.status == "succeeded"]
    timings = [one.timings for one in done]
    view: dict[str, Any] = {
        "requests": len(seen),
        "capped": len(seen) >= NEWEST,
        "slo": slo.model_dump(exclude_none=True) if slo else None,
    }
    if len(done) < ENOUGH:
        return view
    read = sum(one.input_tokens + one.cached_input_tokens for one in done)
    drafted = sum(timing.drafted for timing in timings)
    ends = Counter(one.reason for one in seen if one.status != "succeeded")
    view |= {
        "ttft_ms": _percentiles([timing.first_token_us for timing in timings]),
        "tpot_ms": _percentiles([timing.per_token_us for timing in timings]),
        "longest_gap_ms": _percentiles([timing.gap_us for timing in timings]),
        "queue_ms": _percentiles([timing.queue_us for timing in timings], zeros=True),
        "total_ms": _percentiles([timing.total_us for timing in timings]),
        "output_tokens_per_second": round(sum(one.output_tokens for one in done) / seconds, 3),
        "cached_share": _share(sum(one.cached_input_tokens for one in done), read),
        "acceptance_rate": _share(sum(timing.accepted for timing in timings), drafted),
        "not_succeeded": {reason: _share(count, len(seen)) for reason, count in ends.items()},
        "goodput": None,
    }
    if slo is not None:
        good = sum(missed(slo, timing) is None for timing in timings)
        view["goodput"] = {
            "share": _share(good, len(seen)),
            "requests_per_second": round(good / seconds, 4),
        }
    return view


def _percentiles(values_us: Sequence[int], *, zeros: bool = False) -> dict[str, float] | None:
    """By nearest rank, of those that have the quantity at all; None if fewer than a few do."""
    ordered = sorted(value for value in values_us if value or zeros)
    if len(ordered) < ENOUGH:
        return None
    return {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] / 1000
        for percent in PERCENTILES
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _ms(us: int) -> float | None:
    return us / 1000 if us else None
