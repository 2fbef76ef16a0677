"""Prometheus metrics. Labels are models and outcomes, never accounts, keys or requests."""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

REGISTRY: Final = CollectorRegistry()
DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the directory in which the processes of one gateway share metrics."""

_others: str | None = None


class Durations(Histogram):
    """A histogram of what several requests took, which are counted together."""

    def observe_all(self, seconds: Sequence[float]) -> None:
        """Observe several values, with one change of the sum, and of the bucket of zeros."""
        total = sum(seconds)
        if total:
            self._sum.inc(total)
            for value in seconds:
                self._buckets[bisect_left(self._upper_bounds, value)].inc(1)
        else:  # a phase that did not take place
            self._buckets[0].inc(len(seconds))


_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

ACCEPTED = Counter("tollgate_requests_accepted", "Requests accepted.", ["model"], registry=REGISTRY)
REFUSED = Counter(
    "tollgate_requests_refused", "Requests refused, by error code.", ["code"], registry=REGISTRY
)
SETTLED = Counter(
    "tollgate_requests_settled",
    "Requests closed, by status and outcome.",
    ["model", "status", "outcome"],
    registry=REGISTRY,
)
CHARGED_NANOS = Counter(
    "tollgate_charged_nanos", "Nano-dollars charged.", ["model"], registry=REGISTRY
)
CLIPPED = Counter(
    "tollgate_usage_clipped",
    "Requests whose measured usage exceeded its limit; they are charged at the limit.",
    ["model"],
    registry=REGISTRY,
)
CUT = Counter(
    "tollgate_streams_cut",
    "Streams stopped because their hold could not be extended.",
    ["model", "reason"],
    registry=REGISTRY,
)
SOFT_BUDGETS_PASSED = Counter(
    "tollgate_soft_budgets_passed",
    "Requests accepted although they exceeded a soft budget.",
    ["model"],
    registry=REGISTRY,
)
REJOINED = Counter(
    "tollgate_orders_rejoined",
    "Retries after a disconnect that were joined to the original request.",
    ["model"],
    registry=REGISTRY,
)
LATE_OUTCOMES = Counter(
    "tollgate_outcomes_without_hold",
    "Outcomes of requests that were already settled.",
    registry=REGISTRY,
)
REQUEUED = Counter(
    "tollgate_requests_requeued", "Open requests enqueued again by the sweeper.", registry=REGISTRY
)
UNREADABLE_PRICES = Counter(
    "tollgate_prices_unreadable",
    "Stored prices and discounts that could not be read and were set aside.",
    ["model"],
    registry=REGISTRY,
)
UNREAD_RESULTS = Counter(
    "tollgate_upstream_results_unread",
    "Results that an upstream charges, but that could not be read or stored completely.",
    ["model"],
    registry=REGISTRY,
)
SET_ASIDE = Gauge(
    "tollgate_set_aside",
    "Stored rows that could not be processed and wait for the operator.",
    ["kind"],
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
CLOCK_SKEW_SECONDS = Gauge(
    "tollgate_clock_skew_seconds",
    "Clock of the database minus this gateway's, at the last readiness check.",
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
LOOP_FAILURES = Counter(
    "tollgate_loop_failures",
    "Failures of background loops, which are restarted.",
    ["loop"],
    registry=REGISTRY,
)
PHASE_SECONDS = Durations(
    "tollgate_phase_seconds",
    "Time of charged requests by phase.",
    ["model", "phase"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
BATCHES = Counter(
    "tollgate_batches_ended", "Batches ended, by status.", ["status"], registry=REGISTRY
)
BATCH_LINES = Counter(
    "tollgate_batch_lines_ended",
    "Batch lines that ran or were refused, by result.",
    ["end"],
    registry=REGISTRY,
)
WEBHOOKS = Counter(
    "tollgate_webhooks", "Webhook deliveries, by outcome.", ["outcome"], registry=REGISTRY
)
WEBHOOK_SECONDS = Histogram(
    "tollgate_webhook_seconds",
    "Duration of webhook delivery attempts, by class of error.",
    ["error"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15),
    registry=REGISTRY,
)
WEBHOOK_DELAY_SECONDS = Histogram(
    "tollgate_webhook_delay_seconds",
    "Time from an attempt's due time to its start.",
    buckets=(0.5, 1, 2, 5, 15, 60, 300, 3600),
    registry=REGISTRY,
)
WEBHOOKS_IN_FLIGHT = Gauge(
    "tollgate_webhooks_in_flight",
    "Webhooks that this process is sending.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
WEBHOOK_CIRCUITS = Gauge(
    "tollgate_webhook_circuits_open",
    "Unresponsive receivers, which this process probes with one delivery at a time.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
NOTICES = Counter(
    "tollgate_notices",
    "Notices that were sent, or given up, by kind; one for each receiver.",
    ["kind", "outcome"],
    registry=REGISTRY,
)
NOTICE_SECONDS = Histogram(
    "tollgate_notice_seconds",
    "Duration of attempts to send a notice, by class of error.",
    ["error"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15),
    registry=REGISTRY,
)
CONSOLE_ENTRANCES = Counter(
    "tollgate_console_entrances",
    "Attempts to enter the console, by method and whether they succeeded.",
    ["method", "result"],
    registry=REGISTRY,
)
CSP_REPORTS = Counter(
    "tollgate_csp_reports",
    "Violations of the console's content security policy that browsers reported, by directive.",
    ["directive"],
    registry=REGISTRY,
)
PAYMENTS = Counter(
    "tollgate_payments", "Payment events, by kind.", ["provider", "event"], registry=REGISTRY
)
CHORES = Counter(
    "tollgate_chores",
    "Runs of scheduled tasks, by result.",
    ["chore", "end"],
    registry=REGISTRY,
)
CHORE_SECONDS = Gauge(
    "tollgate_chore_seconds",
    "Duration of a task's last run.",
    ["chore"],
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
DEFAULT_PARTITION_ROWS = Gauge(
    "tollgate_default_partition_rows",
    "Rows in a table's default partition on PostgreSQL, which should be empty; at most 10,000.",
    ["table"],
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
RETENTION_CLEARED = Counter(
    "tollgate_retention_cleared",
    "Rows deleted, or relieved of their metadata, because their retention has ended.",
    ["kind"],
    registry=REGISTRY,
)
RETENTION_FAILURES = Counter(
    "tollgate_retention_failures",
    "Batches of a kind that could not be cleared, to be retried a minute later.",
    ["kind"],
    registry=REGISTRY,
)
RETENTION_LAG_SECONDS = Gauge(
    "tollgate_retention_lag_seconds",
    "Time since which the oldest row of a kind has been due.",
    ["kind"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
UPSTREAM_FINDINGS = Gauge(
    "tollgate_upstream_findings",
    "Differences between the catalog and what upstreams publish, at the last nightly check.",
    ["level"],
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
UPSTREAMS_CHECKED = Gauge(
    "tollgate_upstream_models_checked",
    "Models about which an upstream was asked at the last nightly check.",
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
RECONCILED_AT = Gauge(
    "tollgate_reconciled_at",
    "Unix time of the last reconciliation.",
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
RECONCILE_FINDINGS = Gauge(
    "tollgate_reconcile_findings",
    "Findings of the last reconciliation.",
    multiprocess_mode="mostrecent",
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge(
    "tollgate_queue_depth",
    "Jobs queued.",
    ["model"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
QUEUE_WORK_SECONDS = Gauge(
    "tollgate_queue_work_seconds",
    "Time that the unfinished jobs of a model take in slots of workers, by estimate.",
    ["model"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
QUEUE_OLDEST_SECONDS = Gauge(
    "tollgate_queue_oldest_seconds",
    "Age of the oldest unfinished job of a model.",
    ["model"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
WORKERS = Gauge(
    "tollgate_workers", "Live workers.", multiprocess_mode="livemostrecent", registry=REGISTRY
)
MODEL_RESIDENT = Gauge(
    "tollgate_model_resident_bytes",
    "Memory that a model takes on all live workers.",
    ["model"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
MODEL_LOADS = Gauge(
    "tollgate_model_loads",
    "Loads of a model since the engine processes of the live workers started.",
    ["model"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
WAITING = Gauge(
    "tollgate_clients_waiting",
    "Requests whose clients wait at this process.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)

# Speed, with the times as ``performance.py`` defines them.
_FINE_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)

TTFT_SECONDS = Durations(
    "tollgate_ttft_seconds",
    "Time to the first token, or the first audio.",
    ["model"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
TPOT_SECONDS = Durations(
    "tollgate_tpot_seconds",
    "Mean interval between the tokens of a request.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
GAP_SECONDS = Durations(
    "tollgate_inter_token_seconds",
    "Longest interval between two tokens of a request.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
SLO = Counter(
    "tollgate_slo",
    "Successful requests, by whether they met the SLO of their catalog entry.",
    ["model", "met"],
    registry=REGISTRY,
)
TOKENS = Counter(
    "tollgate_tokens",
    "Input, cached input, output, draft and accepted draft tokens.",
    ["model", "kind"],
    registry=REGISTRY,
)

REAL_TIME_FACTOR = Histogram(
    "tollgate_real_time_factor",
    "Seconds of work per second of audio, of successful requests.",
    ["model"],
    buckets=(0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.5, 2.5, 5, 10),
    registry=REGISTRY,
)
TOTAL_SECONDS = Durations(
    "tollgate_total_seconds",
    "Time from acceptance to charge, of successful requests.",
    ["model"],
    buckets=(*_SECONDS, 600, 1800, 3600),
    registry=REGISTRY,
)
STEP_SECONDS = Histogram(
    "tollgate_step_seconds",
    "A request's share of the time of forward passes, per step of its outputs.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
DELIVERED = Counter(
    "tollgate_delivered",
    "Images, seconds of video and of audio, and steps, of successful requests.",
    ["model", "kind"],
    registry=REGISTRY,
)

for _metric in (
    ACCEPTED,
    SETTLED,
    CHARGED_NANOS,
    PHASE_SECONDS,
    TTFT_SECONDS,
    TPOT_SECONDS,
    GAP_SECONDS,
    TOTAL_SECONDS,
    STEP_SECONDS,
    TOKENS,
):
    # Counted for each request: a child that is known is found without checks and without a lock.
    _metric.__dict__["labels"] = functools.cache(_metric.labels)


def exposition() -> bytes:
    """Render all metrics in Prometheus' text format, summed over the processes of this gateway."""
    if shared():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
    if _others is None:
        return generate_latest(REGISTRY)
    summed = CollectorRegistry()
    summed.register(_Summed(_others))
    return generate_latest(summed)


def add_from(directory: str) -> None:
    """Add what processes that share metrics in a directory have counted to what this one has."""
    global _others
    _others = directory


class _Summed(Collector):
    """This process's metrics, with the counters and histograms of others added."""

    def __init__(self, directory: str) -> None:
        self._others = MultiProcessCollector(  # type: ignore[no-untyped-call]
            CollectorRegistry(), path=directory
        )

    def collect(self) -> Iterator[Metric]:
        others: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {
            family.name: {
                (each.name, frozenset(each.labels.items())): each for each in family.samples
            }
            for family in self._others.collect()  # type: ignore[no-untyped-call]
            if family.type in ("counter", "histogram")
        }
        for family in REGISTRY.collect():
            more = others.get(family.name, {})
            own = [
                each._replace(value=each.value + found.value)
                if (found := more.pop((each.name, frozenset(each.labels.items())), None))
                else each
                for each in family.samples
            ]
            family.samples = [*own, *more.values()]
            yield family


def shared() -> bool:
    """Whether this is one of several processes that share their metrics."""
    return DIRECTORY_VARIABLE in os.environ
