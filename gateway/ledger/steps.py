"""Charges of the steps of a workflow run, and their lines on its receipt.

A run has one hold and one receipt. If the workflow has no price, its charge is the sum of its
steps'. Each step is priced like a separate request: at the price in force when the run was
accepted, clipped to the limits that were held for, rounded once. Part of the settling transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, RowMapping, delete, insert, select

from gateway.ledger.closed import RequestError, warnings_of
from gateway.ledger.prices import PriceCache, read_price
from gateway.ledger.workflow_plan import PlannedStep, StepId, WorkflowPlan, combined
from gateway.pricing import Line, Price, charge, charge_nanos, clip
from gateway.tables.workflows import receipt_steps, steps
from workers.contract.jobs import PromptWarning, RequestId, Timings, Usage

_SUMMED: Final = (
    "queue_us",
    "load_us",
    "preprocess_us",
    "transfer_us",
    "forward_us",
    "postprocess_us",
    "tokens",
)


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step on a receipt. Status ``stopped``: it was still running when the run ended."""

    name: str
    model: str
    task: str
    price_id: int
    status: str
    attempts: int
    charge_nanos: int
    usage: Usage
    timings: Timings
    error: RequestError | None
    placed_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Running:
    """A step that has not ended, and the model in whose queue it is."""

    id: StepId
    model: str


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Usage of the steps of a run, before pricing."""

    lines: tuple[StepLine, ...]
    usage: Usage
    timings: Timings
    running: tuple[Running, ...]
    clipped: bool
    warnings: tuple[PromptWarning, ...]
    """What models did not understand of texts that other steps wrote."""


def measure_steps(connection: Connection, request_id: str, plan: WorkflowPlan) -> StepMeasurement:
    """Read the results of the steps, and delete the rows of those that have ended."""
    rows = list(
        connection.execute(
            select(steps)
            .where(steps.c.request_id == request_id)
            .order_by(steps.c.name, steps.c.attempt)
        ).mappings()
    )
    gone = delete(steps).where(steps.c.request_id == request_id, steps.c.status.is_not(None))
    connection.execute(gone)
    lines, clipped = [], False
    for step in plan.steps:
        line, cut = _line(step, [row for row in rows if row["name"] == step.name])
        lines.append(line)
        clipped = clipped or cut
    delivered = next(line.usage for line in lines if line.name == plan.output_step)
    return StepMeasurement(
        tuple(lines),
        combined((line.usage for line in lines), delivered),
        _summed([line.timings for line in lines]),
        tuple(
            Running(StepId(RequestId(request_id), row["name"], row["attempt"]), row["model"])
            for row in rows
            if row["status"] is None
        ),
        clipped,
        tuple(
            warning
            for row in rows
            if row["status"] == "succeeded"
            for warning in warnings_of(row["job"])
        ),
    )


def charge_steps(
    connection: Connection, lines: Sequence[StepLine], prices: PriceCache
) -> tuple[StepLine, ...]:
    """Price each step separately. Raise ``UnpricedUsage``."""
    return tuple(
        replace(line, charge_nanos=_due(line, read_price(connection, line.price_id, prices)))
        for line in lines
    )


def write_steps(connection: Connection, closed: Sequence[tuple[str, Sequence[StepLine]]]) -> None:
    """Insert the steps of receipts."""
    rows = [
        {
            "request_id": request_id,
            "seq": seq,
            "name": line.name,
            "model": line.model,
            "task": line.task,
            "price_id": line.price_id,
            "status": line.status,
            "attempts": line.attempts,
            "charge_nanos": line.charge_nanos,
            "usage": msgspec.to_builtins(line.usage),
            "timings": msgspec.to_builtins(line.timings),
            "error": msgspec.to_builtins(line.error) if line.error else None,
            "placed_at": line.placed_at,
            "ended_at": line.ended_at,
        }
        for request_id, lines in closed
        for seq, line in enumerate(lines)
    ]
    if rows:
        connection.execute(insert(receipt_steps), rows)


def read_steps(connection: Connection, request_id: str) -> tuple[StepLine, ...]:
    """Read the steps on a receipt in order; empty unless it is that of a workflow run."""
    rows = connection.execute(
        select(receipt_steps)
        .where(receipt_steps.c.request_id == request_id)
        .order_by(receipt_steps.c.seq)
    ).mappings()
    return tuple(read_step(row) for row in rows)


def itemized(
    connection: Connection,
    request_id: str,
    price: Price,
    usage: Usage,
    prices: PriceCache,
    steps: Sequence[StepLine] | None = None,
) -> Iterator[Line]:
    """Recompute the lines of a charge from price and usage, for a workflow from its steps.

    The steps are read from the database unless they are given, because they are archived.
    """
    if price.components:
        yield from charge(price, usage).lines
        return
    for line in read_steps(connection, request_id) if steps is None else steps:
        if line.charge_nanos:
            yield from charge(read_price(connection, line.price_id, prices), line.usage).lines


def _due(line: StepLine, price: Price) -> int:
    return charge_nanos(price, line.usage) if line.status == "succeeded" else 0


def _line(step: PlannedStep, attempts: Sequence[RowMapping]) -> tuple[StepLine, bool]:
    last = attempts[-1] if attempts else None
    usage, timings, error, clipped = Usage(), Timings(), None, False
    if last is not None and last["status"] is not None:
        measured = msgspec.convert(last["usage"] or {}, Usage)
        usage, clipped = clip(measured, step.limits)
        timings = msgspec.convert(last["timings"] or {}, Timings)
        error = msgspec.convert(last["error"], RequestError) if last["error"] else None
    line = StepLine(
        name=step.name,
        model=step.model,
        task=step.task,
        price_id=step.price_id,
        status="not_run" if last is None else last["status"] or "stopped",
        attempts=len(attempts),
        charge_nanos=0,
        usage=usage,
        timings=timings,
        error=error,
        placed_at=attempts[0]["placed_at"] if attempts else None,
        ended_at=last["ended_at"] if last is not None else None,
    )
    return line, clipped


def _summed(parts: Sequence[Timings]) -> Timings:
    """Sum the timings of all steps; more than the run took if steps ran concurrently."""
    return Timings(**{name: sum(getattr(part, name) for part in parts) for name in _SUMMED})


def read_step(row: Mapping[Any, Any]) -> StepLine:
    """Build a step from a row of ``receipt_steps``."""
    values: dict[str, Any] = {
        name: row[name]
        for name in row
        if name not in ("request_id", "seq", "usage", "timings", "error")
    }
    return StepLine(
        **values,
        usage=msgspec.convert(row["usage"], Usage),
        timings=msgspec.convert(row["timings"], Timings),
        error=msgspec.convert(row["error"], RequestError) if row["error"] else None,
    )
