"""R7: each receipt and each step has the price that was in force, and the charge that it gives."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, RowMapping, select

from gateway.ledger.closed import UNITS
from gateway.ledger.discounts import Discounts, class_price, read_discounts
from gateway.ledger.prices import LIST, PriceCache, not_cancelled, read_price, read_version
from gateway.ledger.proof.findings import Finding, differ
from gateway.ledger.steps import StepLine, itemized, read_step
from gateway.pricing import UnpricedUsage, charge
from gateway.tables.core import price_periods, receipts
from gateway.tables.workflows import receipt_steps
from workers.contract.jobs import Usage

COLUMNS: Final = tuple(
    receipts.c[name]
    for name in (
        "request_id", "account_id", "key_id", "model", "price_id", "outcome", "hold_nanos",
        "charge_nanos", *UNITS, "attributes", "windows", "service_class", "accepted_at",
        "settled_at", "transfer_id",
    )
)  # fmt: skip
"""Columns of ``receipts`` that a proof reads."""


class PriceHistory:
    """All prices and discounts of the past, read again when one has changed."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._periods: dict[tuple[str, int], tuple[list[datetime], list[int | None]]] = {}
        self._discounts: Discounts = {}
        self._cache: PriceCache = {}

    def prove(self, connection: Connection, rows: Sequence[RowMapping]) -> Iterator[Finding]:
        """Price receipts, with the columns ``COLUMNS``, and their steps again."""
        self._refresh(connection)
        steps = _steps_of(connection, [row["request_id"] for row in rows])
        for row in rows:
            yield from self._prove_receipt(connection, row, steps.get(row["request_id"], ()))
            for step in steps.get(row["request_id"], ()):
                yield from self._prove_step(connection, row, step)

    def _prove_receipt(
        self, connection: Connection, row: RowMapping, steps: Sequence[StepLine]
    ) -> Iterator[Finding]:
        request_id, cache = row["request_id"], self._cache
        if not self._was_in_force(connection, row):
            message = f"price {row['price_id']} was not in force when accepted"
            yield Finding("R7", request_id, message)
        if row["outcome"] != "charged":
            return
        usage = Usage(**{unit: row[unit] for unit in UNITS}, attributes=row["attributes"] or {})
        try:
            price = read_price(connection, row["price_id"], cache)
            lines = itemized(connection, request_id, price, usage, cache, steps)
            due = sum(line.amount_nanos for line in lines)
        except (UnpricedUsage, ValueError) as error:
            yield Finding("R7", request_id, f"cannot be priced again: {error}")
            return
        if min(due, row["hold_nanos"]) != row["charge_nanos"]:
            yield differ("R7", request_id, "charged", row["charge_nanos"], due)

    def _prove_step(
        self, connection: Connection, row: RowMapping, step: StepLine
    ) -> Iterator[Finding]:
        subject = f"{row['request_id']} step {step.name}"
        if step.price_id != self._due(step.model, row["account_id"], row["accepted_at"]):
            yield Finding("R7", subject, f"price {step.price_id} was not in force when accepted")
        if step.charge_nanos:
            price = read_price(connection, step.price_id, self._cache)
            due = charge(price, step.usage).total_nanos
            if due != step.charge_nanos:
                yield differ("R7", subject, "charged", step.charge_nanos, due)

    def _was_in_force(self, connection: Connection, row: RowMapping) -> bool:
        model, moment = row["model"], row["accepted_at"]
        due = self._due(model, row["account_id"], moment)
        if row["service_class"] == "standard" or due is None:
            return bool(due == row["price_id"])
        full = read_price(connection, due, self._cache)
        own = class_price(full, row["service_class"], self._discounts, model, moment)
        return own == read_price(connection, row["price_id"], self._cache)

    def _due(self, model: str, account_id: int, moment: datetime) -> int | None:
        """Return the price in force for an account, its own or else that of the list."""
        return self._in_force(model, account_id, moment) or self._in_force(model, LIST, moment)

    def _in_force(self, model: str, account_id: int, moment: datetime) -> int | None:
        known = self._periods.get((model, account_id))
        if known is None:
            return None
        starts, prices = known
        place = bisect_right(starts, moment)
        return prices[place - 1] if place else None

    def _refresh(self, connection: Connection) -> None:
        version = read_version(connection)
        if version == self._version:
            return
        self._periods = {}
        columns = [price_periods.c[n] for n in ("model", "account_id", "effective_from")]
        query = select(*columns, price_periods.c.price_id).where(not_cancelled())
        for period in connection.execute(query.order_by(price_periods.c.effective_from)):
            starts, prices = self._periods.setdefault((period[0], period[1]), ([], []))
            starts.append(period[2])
            prices.append(period[3])
        self._discounts = read_discounts(connection)
        self._version = version


def _steps_of(connection: Connection, ids: Sequence[str]) -> Mapping[str, list[StepLine]]:
    found: defaultdict[str, list[StepLine]] = defaultdict(list)
    if ids:
        query = select(receipt_steps).where(receipt_steps.c.request_id.in_(ids))
        for row in connection.execute(query.order_by(receipt_steps.c.seq)).mappings():
            found[row["request_id"]].append(read_step(row))
    return found
