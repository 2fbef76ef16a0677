"""Speed of single requests, and of a model over a period of time. Reads receipts only.

- **TTFT**, time to first token: from enqueueing to the first token; includes queueing, loading and
  prefill.
- **TPOT**, time per output token: the mean interval between the tokens of one sequence.
- **Gap**: the longest interval between two tokens, which is what a reader notices.
- **Forward**: the request's share of the device's time in forward passes. **Step**, for images and
  video: this time divided by the steps of all outputs.
- **First audio**, for speech and music: from enqueueing to the first audio. **Real-time factor**:
  the time from a worker's lease to the end, less loading, per second of audio; below 1, audio is
  generated faster than it plays.
- **Queue**: from enqueueing to a worker's lease. **Total**: from acceptance to charge.
- **Goodput**: requests that succeeded within all bounds of the catalog entry's ``slo``, as a share
  of all that ended and per second.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, NotRequired, TypeAlias, TypedDict, cast

import msgspec
from sqlalchemy import ColumnElement, Connection, func, select

from gateway.catalog.schema import Slo
from gateway.catalog.tasks import makes
from gateway.ids import first_request_id
from gateway.sql.database import Database
from gateway.tables.core import receipts
from workers.contract.jobs import Timings, Usage

Window: TypeAlias = Literal["15m", "1h", "24h"]
WINDOWS: Final[Mapping[Window, timedelta]] = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
}
RECEIPTS_MAX: Final = 10_000
"""Maximum number of receipts that statistics are computed from: the newest."""
RECENT_MAX: Final = 100
"""Maximum number of receipts from which ``RecentSpeed`` is computed: the newest."""
TAKEN_MAX: Final = timedelta(hours=1)
"""Statistics leave out requests that were accepted earlier than this before their window."""
SUCCESSES_MIN: Final = 5
"""Minimum successes for statistics. Below it only the count is returned, so that no aggregate
reveals a single request."""
OutputKind: TypeAlias = Literal["text", "visual", "audio"]
"""Kind of a task's output, which determines its measures: of tokens, steps or audio."""
CACHE_S: Final = 5.0
RECENT_CACHE_S: Final = 60.0
PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class ReceiptSample:
    """The columns of a receipt from which statistics are computed."""

    status: str
    reason: str
    timings: Timings
    settled_at: datetime
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    images: int = 0
    video_ms: int = 0
    steps: int = 0
    audio_ms: int = 0
    characters: int = 0
    served_by: str = ""
    """The version that ran it, if the model has several."""


def missed(slo: Slo, timings: Timings) -> str | None:
    """Return the name of the first bound that a request exceeded; None if it met them all."""
    for name, bound_ms, took_us in (
        ("ttft_ms", slo.ttft_ms, timings.first_token_us),
        ("first_audio_ms", slo.first_audio_ms, timings.first_token_us),
        ("tpot_ms", slo.tpot_ms, timings.per_token_us),
        ("total_ms", slo.total_ms, timings.total_us),
    ):
        if bound_ms is not None and took_us > bound_ms * 1000:
            return name
    return None


def output_kind(task: str) -> OutputKind:
    match makes(task):
        case "image" | "video":
            return "visual"
        case "audio":
            return "audio"
    return "text"


def real_time_factor(timings: Timings, audio_ms: int) -> float | None:
    """Seconds of work per second of audio, to the thousandth."""
    busy_us = timings.total_us - timings.queue_us - timings.load_us
    return round(busy_us / (audio_ms * 1000), 3) if audio_ms and busy_us > 0 else None


class SpeculationView(TypedDict):
    """Draft tokens of a request, and how many the model accepted."""

    drafted: int
    accepted: int
    rate: float


class PerformanceView(TypedDict, total=False):
    """Speed of one request. The fields depend on its task; null means not measured."""

    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float
    first_audio_ms: float | None
    longest_gap_ms: float | None
    real_time_factor: float | None
    forward_ms: float | None
    step_ms: float | None
    total_ms: float | None
    tokens_per_second: float | None
    slo: dict[str, Any] | None
    speculation: SpeculationView | None


class RecentSpeed(NamedTuple):
    """Speed of a model's newest requests; ``success`` is the share that succeeded."""

    median_s: float
    p95_s: float
    success: float


class Percentiles(TypedDict):
    """Percentiles in milliseconds, by nearest rank."""

    p50: float
    p90: float
    p95: float
    p99: float


class GoodputView(TypedDict):
    share: float | None
    requests_per_second: float


class _Speeds(TypedDict, total=False):
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    longest_gap_ms: Percentiles | None
    output_tokens_per_second: float
    cached_share: float | None
    acceptance_rate: float | None
    step_ms: Percentiles | None
    steps: int
    images: int
    images_per_request: float | None
    images_per_second: float
    video_seconds: float
    video_seconds_per_second: float
    first_audio_ms: Percentiles | None
    real_time_factor: Percentiles | None
    audio_seconds: float
    audio_seconds_per_second: float
    characters: int
    characters_per_second: float
    queue_ms: Percentiles | None
    forward_ms: Percentiles | None
    total_ms: Percentiles | None
    not_succeeded: dict[str, float | None]
    goodput: GoodputView | None


class SpeedView(_Speeds):
    """Speed of a model over a window; with too few successes, only their count."""

    requests: int
    capped: bool
    slo: dict[str, Any] | None


class StatsView(SpeedView):
    object: Literal["model.stats"]
    model: str
    window: str
    versions: NotRequired[dict[str, SpeedView]]
    """For administrators: the same for each version, if several ran requests of the window."""


def performance_view(
    timings: Timings, slo: Slo | None, *, succeeded: bool, task: str, usage: Usage
) -> PerformanceView:
    """Return the speed of a request for its receipt; null means not measured."""
    match output_kind(task):
        case "visual":
            view = _visual_view(timings, usage)
        case "audio":
            view = _audio_view(timings, usage)
        case _:
            view = _text_view(timings)
    if slo is not None:
        bound = missed(slo, timings)
        view["slo"] = {
            **slo.model_dump(exclude_none=True),
            "met": succeeded and bound is None,
            "missed": bound,
        }
    return view


def _visual_view(timings: Timings, drawn: Usage) -> PerformanceView:
    return {
        "queue_ms": timings.queue_us / 1000,
        "forward_ms": _ms(timings.forward_us),
        "step_ms": _ms(_step_us(timings, drawn.steps)),
        "total_ms": _ms(timings.total_us),
        "slo": None,
    }


def _audio_view(timings: Timings, made: Usage) -> PerformanceView:
    return {
        "queue_ms": timings.queue_us / 1000,
        "first_audio_ms": _ms(timings.first_token_us),
        "longest_gap_ms": _ms(timings.gap_us),
        "real_time_factor": real_time_factor(timings, made.audio_ms),
        "forward_ms": _ms(timings.forward_us),
        "total_ms": _ms(timings.total_us),
        "slo": None,
    }


def _text_view(timings: Timings) -> PerformanceView:
    per_token_us = timings.per_token_us
    view: PerformanceView = {
        "ttft_ms": _ms(timings.first_token_us),
        "tpot_ms": _ms(per_token_us),
        "longest_gap_ms": _ms(timings.gap_us),
        "tokens_per_second": round(1e6 / per_token_us, 1) if per_token_us else None,
        "slo": None,
        "speculation": None,
    }
    if timings.drafted:
        view["speculation"] = {
            "drafted": timings.drafted,
            "accepted": timings.accepted,
            "rate": round(timings.accepted / timings.drafted, 3),
        }
    return view


class Performance:
    """Statistics of models, cached for a few seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[tuple[str, Window], tuple[float, StatsView]] = {}
        self._reading: dict[tuple[str, Window], asyncio.Lock] = {}
        self._recent: tuple[float, Mapping[str, RecentSpeed]] | None = None
        self._reading_recent = asyncio.Lock()

    async def recent(self, models: Sequence[str]) -> Mapping[str, RecentSpeed]:
        """Return the speed of the newest requests by model; read once a minute."""
        async with self._reading_recent:
            if self._recent is None or time.monotonic() - self._recent[0] >= RECENT_CACHE_S:
                since = datetime.now(UTC) - WINDOWS["24h"]
                found = await self._database.report(
                    lambda connection: read_recent(connection, models, since), account_id=None
                )
                self._recent = time.monotonic(), found
            return self._recent[1]

    async def median_seconds(self, models: Sequence[str]) -> Mapping[str, float]:
        """Return the median duration of the newest successes by model."""
        return {name: found.median_s for name, found in (await self.recent(models)).items()}

    async def stats(
        self, model: str, slo: Slo | None, window: Window, *, kind: OutputKind
    ) -> StatsView:
        # Of several concurrent calls one reads, and the others use its result.
        async with self._reading.setdefault((model, window), asyncio.Lock()):
            return await self._stats(model, slo, window, kind=kind)

    async def _stats(
        self, model: str, slo: Slo | None, window: Window, *, kind: OutputKind
    ) -> StatsView:
        kept = self._kept.get((model, window))
        if kept is not None and time.monotonic() - kept[0] < CACHE_S:
            return kept[1]
        since = datetime.now(UTC) - WINDOWS[window]
        samples = await self._database.report(
            lambda connection: read_samples(connection, model, since), account_id=None
        )
        if len(samples) >= RECEIPTS_MAX:
            since = min(sample.settled_at for sample in samples)
        seconds = (datetime.now(UTC) - since).total_seconds()
        view: StatsView = {
            "object": "model.stats",
            "model": model,
            "window": window,
            **summarize(samples, slo, seconds, kind=kind),  # type: ignore[typeddict-item]  # see below
        }
        names = sorted({one.served_by for one in samples})
        if len(names) > 1:
            view["versions"] = {
                name or model: summarize(
                    [one for one in samples if one.served_by == name],
                    slo,
                    seconds,
                    kind=kind,
                    successes_min=0,
                )
                for name in names
            }
        self._kept[model, window] = time.monotonic(), view
        return view


def read_samples(connection: Connection, model: str, since: datetime) -> list[ReceiptSample]:
    """Read the newest receipts of a model since a moment, without batches, which have no SLO."""
    columns = (receipts.c[one.name] for one in fields(ReceiptSample) if one.name in receipts.c)
    served_by = func.coalesce(receipts.c.run["served_by"].as_string(), "").label("served_by")
    rows = connection.execute(
        select(*columns, served_by)
        .where(
            *_of_model(model, since),
            receipts.c.service_class == "standard",
        )
        .order_by(receipts.c.request_id.desc())
        .limit(RECEIPTS_MAX)
    )
    return [
        ReceiptSample(**{**row, "timings": msgspec.convert(row["timings"], Timings)})
        for row in rows.mappings()
    ]


def read_recent(
    connection: Connection, models: Iterable[str], since: datetime
) -> dict[str, RecentSpeed]:
    """Return the speed of each model's newest requests, outside of batches.

    One short index scan for each model. Models with fewer than ``SUCCESSES_MIN`` are left out.
    """
    found = {}
    for model in models:
        newest = (
            select(receipts.c.status, receipts.c.timings)
            .where(
                *_of_model(model, since),
                # A request that its client cancelled neither succeeded nor failed.
                receipts.c.status != "cancelled",
                receipts.c.service_class == "standard",
            )
            .order_by(receipts.c.request_id.desc())
            .limit(RECENT_MAX)
        )
        rows = connection.execute(newest).all()
        done = [row.timings.get("total_us", 0) for row in rows if row.status == "succeeded"]
        if (took := _percentiles(done, zeros=True)) is not None:
            success = len(done) / len(rows)
            median_s = round(statistics.median(done) / 1e6, 3)
            found[model] = RecentSpeed(median_s, round(took["p95"] / 1e3, 3), success)
    return found


def _of_model(model: str, since: datetime) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the receipts of a model settled since a moment, for its index by
    id."""
    return [
        receipts.c.model == model,
        receipts.c.request_id >= first_request_id(since - TAKEN_MAX),
        receipts.c.settled_at >= since,
    ]


def summarize(
    samples: Sequence[ReceiptSample],
    slo: Slo | None,
    seconds: float,
    *,
    kind: OutputKind,
    successes_min: int = SUCCESSES_MIN,
) -> SpeedView:
    """Aggregate the receipts of a span of ``seconds``."""
    done = [one for one in samples if one.status == "succeeded"]
    timings = [one.timings for one in done]
    view: SpeedView = {
        "requests": len(samples),
        "capped": len(samples) >= RECEIPTS_MAX,
        "slo": slo.model_dump(exclude_none=True) if slo else None,
    }
    if len(done) < successes_min:
        return view
    ends = Counter(one.reason for one in samples if one.status != "succeeded")
    view.update(cast("SpeedView", _SUMMARIES[kind](done, seconds)))
    view |= {
        "queue_ms": _percentiles([timing.queue_us for timing in timings], zeros=True),
        "forward_ms": _percentiles([timing.forward_us for timing in timings]),
        "total_ms": _percentiles([timing.total_us for timing in timings]),
        "not_succeeded": {reason: _share(count, len(samples)) for reason, count in ends.items()},
        "goodput": None,
    }
    if slo is not None:
        good = sum(missed(slo, timing) is None for timing in timings)
        view["goodput"] = {
            "share": _share(good, len(samples)),
            "requests_per_second": round(good / seconds, 4),
        }
    return view


def _text_speeds(done: Sequence[ReceiptSample], seconds: float) -> _Speeds:
    timings = [one.timings for one in done]
    read = sum(one.input_tokens + one.cached_input_tokens for one in done)
    drafted = sum(timing.drafted for timing in timings)
    return {
        "ttft_ms": _percentiles([timing.first_token_us for timing in timings]),
        "tpot_ms": _percentiles([timing.per_token_us for timing in timings]),
        "longest_gap_ms": _percentiles([timing.gap_us for timing in timings]),
        "output_tokens_per_second": round(sum(one.output_tokens for one in done) / seconds, 3),
        "cached_share": _share(sum(one.cached_input_tokens for one in done), read),
        "acceptance_rate": _share(sum(timing.accepted for timing in timings), drafted),
    }


def _visual_speeds(done: Sequence[ReceiptSample], seconds: float) -> _Speeds:
    images = sum(one.images for one in done)
    video_s = sum(one.video_ms for one in done) / 1000
    return {
        "step_ms": _percentiles([_step_us(one.timings, one.steps) for one in done]),
        "steps": sum(one.steps for one in done),
        "images": images,
        "images_per_request": _share(images, len(done)),
        "images_per_second": round(images / seconds, 4),
        "video_seconds": video_s,
        "video_seconds_per_second": round(video_s / seconds, 4),
    }


def _audio_speeds(done: Sequence[ReceiptSample], seconds: float) -> _Speeds:
    factors = [real_time_factor(one.timings, one.audio_ms) or 0 for one in done]
    audio_s = sum(one.audio_ms for one in done) / 1000
    characters = sum(one.characters for one in done)
    return {
        "first_audio_ms": _percentiles([one.timings.first_token_us for one in done]),
        "longest_gap_ms": _percentiles([one.timings.gap_us for one in done]),
        # In thousandths: ``_percentiles`` divides by 1000.
        "real_time_factor": _percentiles([round(factor * 1000) for factor in factors]),
        "audio_seconds": audio_s,
        "audio_seconds_per_second": round(audio_s / seconds, 4),
        "characters": characters,
        "characters_per_second": round(characters / seconds, 4),
    }


_SUMMARIES: Final[Mapping[OutputKind, Callable[[Sequence[ReceiptSample], float], _Speeds]]] = {
    "text": _text_speeds,
    "visual": _visual_speeds,
    "audio": _audio_speeds,
}


def _step_us(timings: Timings, steps: int) -> int:
    return round(timings.forward_us / steps) if steps else 0


def _percentiles(values_us: Sequence[int], *, zeros: bool = False) -> Percentiles | None:
    """Percentiles of the values that were measured; None with fewer than ``SUCCESSES_MIN``."""
    ordered = sorted(value for value in values_us if value or zeros)
    if len(ordered) < SUCCESSES_MIN:
        return None
    found = {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] / 1000
        for percent in PERCENTILES
    }
    return cast("Percentiles", found)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _ms(us: int) -> float | None:
    return us / 1000 if us else None
