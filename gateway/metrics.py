"""What Prometheus is told. Labels are models and outcomes, never accounts, keys or requests."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY: Final = CollectorRegistry()

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

ACCEPTED = Counter("tollgate_requests_accepted", "Requests held for.", ["model"], registry=REGISTRY)
REFUSED = Counter(
    "tollgate_requests_refused", "Orders not accepted, by error code.", ["code"], registry=REGISTRY
)
SETTLED = Counter(
    "tollgate_requests_settled",
    "Requests closed, by how they ended.",
    ["model", "status", "outcome"],
    registry=REGISTRY,
)
CHARGED_NANOS = Counter(
    "tollgate_charged_nanos", "Nano-dollars charged.", ["model"], registry=REGISTRY
)
CLIPPED = Counter(
    "tollgate_usage_clipped",
    "Requests whose measured usage was above its limit, and was charged at the limit.",
    ["model"],
    registry=REGISTRY,
)
CUT = Counter(
    "tollgate_streams_cut",
    "Streams stopped because nothing more could be held for them.",
    ["model", "reason"],
    registry=REGISTRY,
)
SOFT_BUDGETS_PASSED = Counter(
    "tollgate_soft_budgets_passed",
    "How often a request was accepted though a soft budget did not cover it.",
    ["model"],
    registry=REGISTRY,
)
REJOINED = Counter(
    "tollgate_orders_rejoined",
    "Orders that repeated one whose connection had broken, and were not placed again.",
    ["model"],
    registry=REGISTRY,
)
LATE_OUTCOMES = Counter(
    "tollgate_outcomes_without_hold",
    "Outcomes of requests that had been settled before.",
    registry=REGISTRY,
)
REQUEUED = Counter(
    "tollgate_requests_requeued", "Open requests that the queue had lost.", registry=REGISTRY
)
PHASE_SECONDS = Histogram(
    "tollgate_phase_seconds",
    "Where the time of charged requests went.",
    ["model", "phase"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
BATCHES = Counter(
    "tollgate_batches_ended", "Batches, by how they ended.", ["status"], registry=REGISTRY
)
BATCH_LINES = Counter(
    "tollgate_batch_lines_ended",
    "Lines of batches that were run or refused, by how they ended.",
    ["end"],
    registry=REGISTRY,
)
WEBHOOKS = Counter(
    "tollgate_webhooks", "Webhooks, by what became of them.", ["outcome"], registry=REGISTRY
)
PAYMENTS = Counter(
    "tollgate_payments", "What payment providers told.", ["provider", "event"], registry=REGISTRY
)
CHORES = Counter(
    "tollgate_chores",
    "Chores of the books, by how they ended.",
    ["chore", "end"],
    registry=REGISTRY,
)
CHORE_SECONDS = Gauge(
    "tollgate_chore_seconds", "How long a chore took the last time.", ["chore"], registry=REGISTRY
)
RECONCILED_AT = Gauge(
    "tollgate_reconciled_at", "When the books were last reconciled.", registry=REGISTRY
)
RECONCILE_FINDINGS = Gauge(
    "tollgate_reconcile_findings", "What did not agree then; 0 is a proof.", registry=REGISTRY
)
QUEUE_DEPTH = Gauge("tollgate_queue_depth", "Jobs queued.", ["model"], registry=REGISTRY)
WORKERS = Gauge("tollgate_workers", "Workers that announce themselves.", registry=REGISTRY)
WAITING = Gauge(
    "tollgate_clients_waiting", "Requests waited for in this process.", registry=REGISTRY
)
