"""Views of the native API: requests, receipts, quotes. Pure; amounts are decimal USD strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from gateway.api.http.media_views import LinkView, MediumView, link_view, media_views
from gateway.catalog.schema import Slo
from gateway.checks.moments import timestamp
from gateway.feedback.views import FeedbackView
from gateway.files.download_urls import UrlSigner
from gateway.files.kept_inputs import KeptInput
from gateway.ledger.closed import ClosedRequest, RequestError
from gateway.ledger.expenses import ExpenseRates, with_cost
from gateway.ledger.receipts import Receipt
from gateway.ledger.steps import StepLine
from gateway.performance import PerformanceView, performance_view
from gateway.pricing import Line, format_usd
from gateway.requests.quotes import ORDERED_AS, Quoted
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import PromptWarning, Timings, Usage


class OrderedAs(TypedDict, total=False):
    """Present if the model was requested by an alias."""

    ordered_as: str


class AttachmentView(LinkView):
    """A file that was sent, at a presigned URL."""

    content_type: str
    bytes: int
    sha256: str


class RequestInputView(TypedDict):
    """What was sent: the fields of ``POST /v1/requests``, in which ``{"attachment": 0}`` stands for
    the first of ``attachments``."""

    object: Literal["request.input"]
    model: str
    task: str
    input: dict[str, Any]
    attachments: list[AttachmentView]


class RequestView(OrderedAs):
    """A request; its status determines which fields are null."""

    id: str
    object: Literal["request"]
    model: str
    task: str
    status: str
    output: dict[str, Any] | None
    error: RequestError | None
    usage: Usage | None
    cost: str | None
    hold: str
    created_at: str
    settled_at: str | None
    metadata: dict[str, str]
    feedback: NotRequired[FeedbackView]
    queue_position: NotRequired[int | None]
    expires_at: NotRequired[str]
    warnings: NotRequired[list[PromptWarning]]


class LineView(TypedDict):
    """A component of a price with the charged quantity."""

    unit: str
    quantity: int | str
    price: str
    per: int
    amount: str


class RefundView(TypedDict):
    kind: str
    amount: str
    reason: str
    booked_at: str


class PhasesView(TypedDict):
    """Durations in microseconds."""

    queue_us: int
    load_us: int
    preprocess_us: int
    transfer_us: int
    forward_us: int
    postprocess_us: int
    first_token_us: int


class TimingsView(PhasesView):
    total_us: int
    tokens: int


class StepView(TypedDict):
    """A step of a workflow; its cost is part of the receipt's, or 0 if the workflow has a price."""

    name: str
    model: str
    task: str
    status: str
    attempts: int
    price_id: int
    cost: str
    usage: Usage
    timings: PhasesView
    error: RequestError | None
    started_at: str | None
    ended_at: str | None


class MarginView(TypedDict):
    """How a request ran, and its cost to the operator; shown to administrators only.

    ``cost`` and ``margin`` are absent if a part of the cost is not known.
    """

    worker: str
    attempt: int
    device: str
    dtype: str
    rows: int
    endpoint: str
    served_by: str
    device_seconds: str
    device_cost: str | None
    upstream_cost: str | None
    gpu_hour: NotRequired[str]
    cost: NotRequired[str]
    revenue: str
    margin: NotRequired[str]


class ReceiptView(OrderedAs):
    """The itemised record of one request."""

    request_id: str
    object: Literal["receipt"]
    model: str
    task: str
    status: str
    outcome: str
    reason: str
    service_class: str
    price_id: int
    lines: list[LineView]
    cost: str
    refunds: list[RefundView]
    net_cost: str
    hold: str
    released: str
    usage: Usage
    timings: TimingsView
    performance: PerformanceView
    accepted_at: str
    settled_at: str
    steps: NotRequired[list[StepView]]
    media: NotRequired[list[MediumView]]
    operator: NotRequired[MarginView]


class QuotedStepView(TypedDict):
    name: str
    model: str
    task: str
    price_id: int
    max_cost: str
    lines: list[LineView]


class QuoteView(OrderedAs):
    """The maximum cost of a request."""

    object: Literal["quote"]
    model: str
    task: str
    service_class: str
    price_id: int
    max_cost: str
    lines: list[LineView]
    steps: NotRequired[list[QuotedStepView]]
    warnings: NotRequired[list[PromptWarning]]


def request_view(found: OpenRequest | ClosedRequest, links: UrlSigner | None) -> RequestView:
    """Return a request; without ``links``, its media are left as the worker described them."""
    view: RequestView = {
        "id": found.request_id,
        "object": "request",
        "model": found.model,
        "task": found.task,
        "status": found.status,
        "output": None,
        "error": None,
        "usage": None,
        "cost": None,
        "hold": format_usd(found.hold_nanos),
        "created_at": timestamp(found.accepted_at),
        "settled_at": None,
        "metadata": dict(found.metadata),
    }
    if found.warnings:
        view["warnings"] = list(found.warnings)
    if isinstance(found, OpenRequest):
        view["queue_position"] = found.position
        view["expires_at"] = timestamp(found.deadline_at)
        return view
    if found.output is not None and found.output.stored and not found.output.is_loaded:
        # In lists and webhooks, which would otherwise contain complete outputs.
        view["output"] = {"omitted": True, "bytes": found.output.stored.bytes}
    elif found.output is not None:
        output = {**found.output.value}
        if "media" in found.output.value and links is not None:
            output["media"] = media_views(found, links)
        view["output"] = output
    if found.error is not None:
        view["error"] = msgspec.to_builtins(found.error)
    view["usage"] = msgspec.to_builtins(found.usage)
    if ORDERED_AS in found.usage.attributes:
        view["ordered_as"] = found.usage.attributes[ORDERED_AS]
    view["cost"] = format_usd(found.cost_nanos)
    view["settled_at"] = timestamp(found.settled_at)
    return view


def receipt_view(receipt: Receipt, slo: Slo | None = None) -> ReceiptView:
    """Itemise a request, including the steps of a workflow."""
    closed, given = receipt.closed, receipt.refunds
    timings = closed.timings
    view: ReceiptView = {
        "request_id": closed.request_id,
        "object": "receipt",
        "model": closed.model,
        **_ordered_as(closed.usage),  # type: ignore[typeddict-item]  # optional fields are added below
        "task": closed.task,
        "status": closed.status,
        "outcome": closed.outcome,
        "reason": closed.reason,
        "service_class": closed.service_class,
        "price_id": closed.price_id,
        "lines": line_views(receipt.lines),
        "cost": format_usd(closed.cost_nanos),
        "refunds": [
            {
                "kind": refund.kind,
                "amount": format_usd(refund.amount_nanos),
                "reason": refund.reason,
                "booked_at": timestamp(refund.booked_at),
            }
            for refund in given
        ],
        "net_cost": format_usd(closed.cost_nanos - sum(each.amount_nanos for each in given)),
        "hold": format_usd(closed.hold_nanos),
        "released": format_usd(closed.hold_nanos - closed.cost_nanos),
        "usage": msgspec.to_builtins(closed.usage),
        "timings": {**_phases(timings), "total_us": timings.total_us, "tokens": timings.tokens},
        "performance": performance_view(
            timings,
            # Batches have no SLO.
            slo if closed.service_class == "standard" else None,
            succeeded=closed.status == "succeeded",
            task=closed.task,
            usage=closed.usage,
        ),
        "accepted_at": timestamp(closed.accepted_at),
        "settled_at": timestamp(closed.settled_at),
    }
    if receipt.steps:
        view["steps"] = [_step_view(line) for line in receipt.steps]
    return view


def _step_view(line: StepLine) -> StepView:
    """One step of a workflow run; its cost is part of the run's, or 0 if that has a price."""
    return {
        "name": line.name,
        "model": line.model,
        "task": line.task,
        "status": line.status,
        "attempts": line.attempts,
        "price_id": line.price_id,
        "cost": format_usd(line.charge_nanos),
        "usage": msgspec.to_builtins(line.usage),
        "timings": _phases(line.timings),
        "error": msgspec.to_builtins(line.error) if line.error else None,
        "started_at": timestamp(line.placed_at) if line.placed_at else None,
        "ended_at": timestamp(line.ended_at) if line.ended_at else None,
    }


def _phases(timings: Timings) -> PhasesView:
    return {
        "queue_us": timings.queue_us,
        "load_us": timings.load_us,
        "preprocess_us": timings.preprocess_us,
        "transfer_us": timings.transfer_us,
        "forward_us": timings.forward_us,
        "postprocess_us": timings.postprocess_us,
        "first_token_us": timings.first_token_us,
    }


def margin_view(closed: ClosedRequest, returned_nanos: int, rates: ExpenseRates) -> MarginView:
    """Return how a request ran, its cost and margin; failed requests have a cost, too.

    The cost is that of its settlement. Device time that had no price then is priced now.
    """
    usage, run, cost = closed.usage, closed.run, closed.expense_nanos
    hour_nanos = rates.hour_of(run.device)
    if cost is None and usage.gpu_us and not run.endpoint:
        run, cost = with_cost(run, rates, run.served_by or closed.model, usage)
    kept = closed.cost_nanos - returned_nanos
    view: MarginView = {
        "worker": run.worker,
        "attempt": run.attempt,
        "device": run.device,
        "dtype": run.dtype,
        "rows": run.rows,
        "endpoint": run.endpoint,
        "served_by": run.served_by or closed.model,
        "device_seconds": f"{usage.gpu_us / 1e6:.6f}",
        "device_cost": None if run.device_nanos is None else format_usd(run.device_nanos),
        "upstream_cost": None if run.upstream_nanos is None else format_usd(run.upstream_nanos),
        "revenue": format_usd(kept),
    }
    if hour_nanos is not None:
        view["gpu_hour"] = format_usd(hour_nanos)
    if cost is not None:
        view["cost"] = format_usd(cost)
        view["margin"] = format_usd(kept - cost)
    return view


def quote_view(quoted: Quoted) -> QuoteView:
    view: QuoteView = {
        "object": "quote",
        "model": quoted.entry.name,
        **_ordered_as(quoted.prepared.limits),  # type: ignore[typeddict-item]  # optional fields are added below
        "task": quoted.task,
        "service_class": quoted.submission.service_class,
        "price_id": quoted.price_id,
        "max_cost": format_usd(quoted.bill.total_nanos),
        "lines": line_views(quoted.bill.lines),
    }
    if quoted.workflow is not None:
        view["steps"] = [
            {
                "name": one.step.name,
                "model": one.step.model,
                "task": one.step.task,
                "price_id": one.step.price_id,
                # Its cost as a separate request, even if the workflow has its own price.
                "max_cost": format_usd(one.bill.total_nanos),
                "lines": line_views(one.bill.lines),
            }
            for one in quoted.workflow.steps
        ]
    if quoted.warnings:
        view["warnings"] = list(quoted.warnings)
    return view


def _ordered_as(usage: Usage) -> OrderedAs:
    """Return the requested name, if it is an alias of the model."""
    name = usage.attributes.get(ORDERED_AS)
    return {"ordered_as": name} if name is not None else {}


def line_views(lines: Iterable[Line]) -> list[LineView]:
    return [
        {
            "unit": line.unit,
            "quantity": int(line.quantity) if line.quantity.isdecimal() else line.quantity,
            "price": format_usd(line.price_nanos),
            "per": line.per,
            "amount": format_usd(line.amount_nanos),
        }
        for line in lines
    ]


def request_input_view(kept: KeptInput, links: UrlSigner) -> RequestInputView:
    return {
        "object": "request.input",
        "model": kept.model,
        "task": kept.task,
        "input": dict(kept.input),
        "attachments": [
            {
                **link_view(blob, links),
                "content_type": blob.content_type,
                "bytes": blob.bytes,
                "sha256": blob.sha256,
            }
            for blob in kept.attachments
        ],
    }
