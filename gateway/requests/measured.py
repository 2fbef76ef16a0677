"""Counts settled requests in the metrics: ends, charges, outputs, speed; and what was cancelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from gateway import metrics
from gateway.catalog.schema import CatalogEntry, Slo
from gateway.ledger.closed import ClosedRequest
from gateway.performance import missed, real_time_factor


def count_closed(
    closed: Iterable[ClosedRequest], find: Callable[[str], CatalogEntry | None]
) -> None:
    """Count the ends of requests, their charges and phases, and outputs and speed of successes.

    Requests of one model are counted together: a batch changes each metric once. The speed is that
    of requests of the standard class; those of batches wait on purpose.
    """
    by_model: dict[str, list[ClosedRequest]] = {}
    for one in closed:
        by_model.setdefault(one.model, []).append(one)
    for model, ends in by_model.items():
        for one in ends:
            metrics.SETTLED.labels(model, one.status, one.outcome).inc()
        if charged := [one for one in ends if one.outcome == "charged"]:
            metrics.CHARGED_NANOS.labels(model).inc(sum(one.cost_nanos for one in charged))
            for phase, took_us in _PHASES:
                seconds = [took_us(one.timings) / 1e6 for one in charged]
                metrics.PHASE_SECONDS.labels(model, phase).observe_all(seconds)
        if succeeded := [one for one in ends if one.status == "succeeded"]:
            _count_delivered(model, succeeded)
            measured = [one for one in succeeded if one.service_class == "standard"]
            if measured:
                entry = find(model)
                _count_speed(model, measured, entry.slo if entry else None)


def _count_delivered(model: str, closed: Sequence[ClosedRequest]) -> None:
    """Count the outputs of successful requests, in batches or not."""
    for one in closed:
        usage = one.usage
        if usage.steps or usage.images or usage.video_ms or usage.audio_ms:
            for kind, count in (
                ("image", usage.images),
                ("video_second", usage.video_ms / 1000),
                ("audio_second", usage.audio_ms / 1000),
                ("step", usage.steps),
            ):
                if count:
                    metrics.DELIVERED.labels(model, kind).inc(count)


def _count_speed(model: str, closed: Sequence[ClosedRequest], slo: Slo | None) -> None:
    """Record the speed of successful requests."""
    for histogram, took_us in _SPEEDS:
        if seconds := [took / 1e6 for one in closed if (took := took_us(one))]:
            histogram.labels(model).observe_all(seconds)
    for kind, count_of in _TOKENS:
        if count := sum(map(count_of, closed)):
            metrics.TOKENS.labels(model, kind).inc(count)
    for one in closed:
        if one.usage.steps and one.timings.forward_us:
            step_us = one.timings.forward_us / one.usage.steps
            metrics.STEP_SECONDS.labels(model).observe(step_us / 1e6)
        if one.usage.audio_ms:
            factor = real_time_factor(one.timings, one.usage.audio_ms)
            if factor is not None:
                metrics.REAL_TIME_FACTOR.labels(model).observe(factor)
        if slo is not None:
            metrics.SLO.labels(model, "no" if missed(slo, one.timings) else "yes").inc()


_PHASES: Final = tuple(
    (phase, attrgetter(f"{phase}_us"))
    for phase in ("queue", "load", "preprocess", "transfer", "forward", "postprocess")
)
_SPEEDS: Final[Sequence[tuple[metrics.Durations, Callable[[ClosedRequest], int]]]] = (
    (metrics.TTFT_SECONDS, attrgetter("timings.first_token_us")),
    (metrics.TPOT_SECONDS, attrgetter("timings.per_token_us")),
    (metrics.GAP_SECONDS, attrgetter("timings.gap_us")),
    (metrics.TOTAL_SECONDS, attrgetter("timings.total_us")),
)
_TOKENS: Final[Sequence[tuple[str, Callable[[ClosedRequest], int]]]] = (
    ("input", attrgetter("usage.input_tokens")),
    ("cached_input", attrgetter("usage.cached_input_tokens")),
    ("output", attrgetter("usage.output_tokens")),
    ("drafted", attrgetter("timings.drafted")),
    ("accepted", attrgetter("timings.accepted")),
)


def cancelled_us(closed: Iterable[ClosedRequest]) -> Mapping[int, int]:
    """Sum the device time of requests that clients cancelled without a charge, by account."""
    found: Counter[int] = Counter()
    for one in closed:
        free = one.outcome == "released" and one.usage.gpu_us
        if free and (one.status, one.reason) == ("cancelled", "client"):
            found[one.account_id] += one.usage.gpu_us
    return found
