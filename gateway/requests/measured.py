"""Counts outputs and speed of settled requests in the metrics."""

from __future__ import annotations

from gateway import metrics
from gateway.catalog.schema import Slo
from gateway.ledger.closed import ClosedRequest
from gateway.performance import missed, real_time_factor


def count_delivered(closed: ClosedRequest) -> None:
    """Count the outputs of a successful request, in a batch or not."""
    usage = closed.usage
    for kind, count in (
        ("image", usage.images),
        ("video_second", usage.video_ms / 1000),
        ("audio_second", usage.audio_ms / 1000),
        ("step", usage.steps),
    ):
        if count:
            metrics.DELIVERED.labels(closed.model, kind).inc(count)


def count_speed(closed: ClosedRequest, slo: Slo | None) -> None:
    """Record the speed of a successful request in the metrics."""
    model, timings, usage = closed.model, closed.timings, closed.usage
    for histogram, took_us in (
        (metrics.TTFT_SECONDS, timings.first_token_us),
        (metrics.TPOT_SECONDS, timings.per_token_us),
        (metrics.GAP_SECONDS, timings.gap_us),
        (metrics.TOTAL_SECONDS, timings.total_us),
        (metrics.STEP_SECONDS, timings.forward_us / usage.steps if usage.steps else 0),
    ):
        if took_us:
            histogram.labels(model).observe(took_us / 1e6)
    factor = real_time_factor(timings, usage.audio_ms) if usage.audio_ms else None
    if factor is not None:
        metrics.REAL_TIME_FACTOR.labels(model).observe(factor)
    for kind, count in (
        ("input", usage.input_tokens),
        ("cached_input", usage.cached_input_tokens),
        ("output", usage.output_tokens),
        ("drafted", timings.drafted),
        ("accepted", timings.accepted),
    ):
        if count:
            metrics.TOKENS.labels(model, kind).inc(count)
    if slo is not None:
        metrics.SLO.labels(model, "no" if missed(slo, timings) else "yes").inc()
