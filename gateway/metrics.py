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
UNREADABLE_PRICES = Counter(
    "tollgate_prices_unreadable",
    "Stored prices and discounts that could not be read and were set aside.",
    ["model"],
    registry=REGISTRY,
)
SET_ASIDE = Gauge(
    "tollgate_set_aside",
    "Stored rows that could not be worked on and wait for the operator.",
    ["kind"],
    registry=REGISTRY,
)
CLOCK_SKEW_SECONDS = Gauge(
    "tollgate_clock_skew_seconds",
    "Clock of the database minus this gateway's, at the last check of readiness.",
    registry=REGISTRY,
)
LOOP_FAILURES = Counter(
    "tollgate_loop_failures",
    "Failures of background loops, each of which was started again.",
    ["loop"],
    registry=REGISTRY,
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
WEBHOOK_SECONDS = Histogram(
    "tollgate_webhook_seconds",
    "Durations of attempts to deliver a webhook, by the class of their error.",
    ["error"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15),
    registry=REGISTRY,
)
WEBHOOK_DELAY_SECONDS = Histogram(
    "tollgate_webhook_delay_seconds",
    "Time from when an attempt was due to its start.",
    buckets=(0.5, 1, 2, 5, 15, 60, 300, 3600),
    registry=REGISTRY,
)
WEBHOOKS_IN_FLIGHT = Gauge(
    "tollgate_webhooks_in_flight", "Webhooks that this process is sending.", registry=REGISTRY
)
WEBHOOK_CIRCUITS = Gauge(
    "tollgate_webhook_circuits_open",
    "Receivers that do not answer, which this process probes one delivery at a time.",
    registry=REGISTRY,
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

# Serving of text, as ``performance.py`` defines the times.
_FINE_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)

TTFT_SECONDS = Histogram(
    "tollgate_ttft_seconds",
    "To the first token, or the first sound.",
    ["model"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
TPOT_SECONDS = Histogram(
    "tollgate_tpot_seconds",
    "From one token to the next, in the mean of a request.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
GAP_SECONDS = Histogram(
    "tollgate_inter_token_seconds",
    "The longest time between two tokens of a request.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
SLO = Counter(
    "tollgate_slo",
    "Requests that succeeded, by whether they kept what the catalog promises.",
    ["model", "met"],
    registry=REGISTRY,
)
TOKENS = Counter(
    "tollgate_tokens",
    "Tokens read, found in the cache, written, guessed ahead, and guessed rightly.",
    ["model", "kind"],
    registry=REGISTRY,
)

REAL_TIME_FACTOR = Histogram(
    "tollgate_real_time_factor",
    "Seconds of work for each second of sound, of requests that succeeded.",
    ["model"],
    buckets=(0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.5, 2.5, 5, 10),
    registry=REGISTRY,
)
TOTAL_SECONDS = Histogram(
    "tollgate_total_seconds",
    "From acceptance to charge, of requests that succeeded.",
    ["model"],
    buckets=(*_SECONDS, 600, 1800, 3600),
    registry=REGISTRY,
)
STEP_SECONDS = Histogram(
    "tollgate_step_seconds",
    "A request's own share of forward passes, for each step of each output that it drew.",
    ["model"],
    buckets=_FINE_SECONDS,
    registry=REGISTRY,
)
DELIVERED = Counter(
    "tollgate_delivered",
    "Pictures, seconds of video and of sound, and steps, of requests that succeeded.",
    ["model", "kind"],
    registry=REGISTRY,
)
