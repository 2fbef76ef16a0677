"""Reconciliation: proves that the books agree, or lists what differs. Reads only.

Each rule is a query that must find nothing. It runs nightly; run it after any incident as well. The
tests run it after every crash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    case,
    cast,
    exists,
    or_,
    select,
)

from gateway.ledger.closed import ClosedRequest, read_closed
from gateway.ledger.concurrency import miscounts
from gateway.ledger.discounts import class_price, read_discounts
from gateway.ledger.periods import month_of
from gateway.ledger.prices import LIST, PriceCache, not_cancelled, read_price
from gateway.ledger.steps import itemized
from gateway.pricing import UnpricedUsage, charge, format_usd
from gateway.sql.database import exact_sum, wide_sum
from gateway.tables.archives import (
    archived_charges,
    archived_spending,
    archived_windows,
    archives,
)
from gateway.tables.core import (
    SYSTEM_ACCOUNTS,
    accounts,
    budget_windows,
    holds,
    keys,
    lots,
    outputs,
    price_periods,
    receipts,
    refunds,
    transfers,
)
from gateway.tables.payments import payments
from gateway.tables.webhooks import webhook_deliveries
from gateway.tables.workflows import receipt_steps
from workers.contract.jobs import Usage

OVERDUE_S: Final = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """One discrepancy: the rule, its subject, and a message with both numbers."""

    rule: str
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} {self.subject}: {self.message}"


def reconcile(connection: Connection, *, now: datetime) -> list[Finding]:
    """Check all rules in one transaction; an empty list proves that the books agree."""
    findings: list[Finding] = []
    for rule in _RULES:
        findings.extend(rule(connection))
    findings.extend(_overdue(connection, now))
    return findings


def _sums_to_zero(connection: Connection) -> Iterator[Finding]:
    """R1: the balances of all accounts, including those of the system, sum to zero."""
    rows = connection.execute(select(accounts.c.id, _balance()))
    total = sum(row.balance for row in rows) + sum(_carried(connection).values())
    if total:
        yield Finding("R1", "ledger", f"all balances sum to {format_usd(total)}, not to 0")


def _posted_is_sum_of_transfers(connection: Connection) -> Iterator[Finding]:
    """R2: a customer's stored balance is the sum of its transfers, and of its archived ones."""
    carried = _carried(connection)
    query = select(accounts.c.id, accounts.c.posted_nanos, _balance()).where(
        accounts.c.kind == "customer"
    )
    for row in connection.execute(query):
        balance = row.balance + carried[row.id]
        if row.posted_nanos != balance:
            yield _differ("R2", f"account {row.id}", "posted", row.posted_nanos, balance)


def _held_is_sum_of_holds(connection: Connection) -> Iterator[Finding]:
    """R3: the held amounts of accounts and keys are the sums of their open holds, and their counts
    of open requests are the numbers of those holds."""
    for table, column in ((accounts, holds.c.account_id), (keys, holds.c.key_id)):
        open_sum = (
            select(exact_sum(holds.c.hold_nanos)).where(column == table.c.id).scalar_subquery()
        )
        query = select(table.c.id, table.c.held_nanos, open_sum.label("open"))
        for row in connection.execute(query):
            if row.held_nanos != row.open:
                yield _differ("R3", f"{table.name[:-1]} {row.id}", "held", row.held_nanos, row.open)
    for wrong in miscounts(connection):
        yield Finding(
            "R3",
            f"{wrong.table.name[:-1]} {wrong.id}",
            f"counts {wrong.stored} open requests, but it should be {wrong.due}",
        )


def _charges_are_sums_of_receipts(connection: Connection) -> Iterator[Finding]:
    """R4: each charge is the sum of its receipts, and each key's spending that of its receipts."""
    billed = (
        select(exact_sum(receipts.c.charge_nanos))
        .where(receipts.c.transfer_id == transfers.c.id)
        .scalar_subquery()
    )
    query = select(
        transfers.c.id, transfers.c.amount_nanos, transfers.c.booked_at, billed.label("billed")
    ).where(transfers.c.kind == "charge")
    # Restoring inserts the charges of a month before their receipts.
    restoring = set(
        connection.execute(
            select(archives.c.month).where(archives.c.state == "restoring")
        ).scalars()
    )
    for row in connection.execute(query):
        if row.amount_nanos != row.billed and month_of(row.booked_at) not in restoring:
            yield _differ("R4", f"transfer {row.id}", "charged", row.amount_nanos, row.billed)
    billed_to_key = select(exact_sum(receipts.c.charge_nanos)).where(receipts.c.key_id == keys.c.id)
    given_back = (
        select(exact_sum(refunds.c.amount_nanos))
        .join(receipts, receipts.c.request_id == refunds.c.request_id)
        .where(receipts.c.key_id == keys.c.id)
    )
    spent = billed_to_key.scalar_subquery() - given_back.scalar_subquery()
    archived = archived_spending.c
    by_key = select(archived.key_id, exact_sum(archived.charge_nanos)).group_by(archived.key_id)
    carried = {row[0]: row[1] for row in connection.execute(by_key)}
    by_now = select(keys.c.id, keys.c.spent_nanos, spent.label("billed"))
    for key_id, stored, billed_now in connection.execute(by_now):
        due = billed_now + carried.get(key_id, 0)
        if stored != due:
            yield _differ("R4", f"key {key_id}", "spent", stored, due)


def _refunds_are_part_of_charges(connection: Connection) -> Iterator[Finding]:
    """R4: each refund moved its amount, and no request was refunded more than its charge."""
    both = select(refunds.c.request_id, refunds.c.amount_nanos, transfers.c.amount_nanos).join(
        transfers, transfers.c.id == refunds.c.transfer_id
    )
    for request_id, amount, moved in connection.execute(
        both.where(refunds.c.amount_nanos != transfers.c.amount_nanos)
    ):
        yield _differ("R4", request_id, "refunded", moved, amount)
    given = exact_sum(refunds.c.amount_nanos)
    over = (
        select(receipts.c.request_id, receipts.c.charge_nanos, given.label("given"))
        .join(refunds, refunds.c.request_id == receipts.c.request_id)
        .group_by(receipts.c.request_id, receipts.c.charge_nanos)
        .having(given > receipts.c.charge_nanos)
    )
    for request_id, charged, back in connection.execute(over):
        yield _differ("R4", request_id, "refunded more than its charge:", back, charged)


def _open_or_closed(connection: Connection) -> Iterator[Finding]:
    """R5: no request has both a hold and a receipt."""
    both = select(holds.c.request_id).join(receipts, receipts.c.request_id == holds.c.request_id)
    for request_id in connection.execute(both).scalars():
        yield Finding("R5", request_id, "has a hold although it has a receipt")


def _overdue(connection: Connection, now: datetime) -> Iterator[Finding]:
    """R6: no hold outlives its deadline by more than a minute."""
    late = select(holds.c.request_id, holds.c.deadline_at).where(
        holds.c.deadline_at < now - timedelta(seconds=OVERDUE_S)
    )
    for row in connection.execute(late):
        yield Finding("R6", row.request_id, f"has a hold past its deadline {row.deadline_at}")


def _prices_were_in_force(connection: Connection) -> Iterator[Finding]:
    """R7: each receipt has the price in force for its account at acceptance, less the discount of
    its class at that moment, and its charge is this price applied to its usage."""
    periods: defaultdict[tuple[str, int], list[tuple[datetime, int | None]]] = defaultdict(list)
    for period in connection.execute(
        select(price_periods).where(not_cancelled()).order_by(price_periods.c.effective_from)
    ):
        periods[period.model, period.account_id].append((period.effective_from, period.price_id))

    def in_force(model: str, account_id: int, moment: datetime) -> int | None:
        known = periods[model, account_id]
        return next((price for start, price in reversed(known) if start <= moment), None)

    discounts = read_discounts(connection)
    cache: PriceCache = {}

    def was_in_force(closed: ClosedRequest) -> bool:
        model, moment = closed.model, closed.accepted_at
        due = in_force(model, closed.account_id, moment) or in_force(model, LIST, moment)
        if closed.service_class == "standard" or due is None:
            return due == closed.price_id
        full = read_price(connection, due, cache)
        own = class_price(full, closed.service_class, discounts, model, moment)
        return own == read_price(connection, closed.price_id, cache)

    query: Select[tuple[object]] = select(receipts, cast(None, BigInteger).label("body"))
    for row in connection.execute(query, execution_options={"yield_per": 1000}).mappings():
        closed = read_closed(row)
        if not was_in_force(closed):
            yield Finding(
                "R7", closed.request_id, f"price {closed.price_id} was not in force when accepted"
            )
        if closed.outcome != "charged":
            continue
        try:
            price = read_price(connection, closed.price_id, cache)
            lines = itemized(connection, closed.request_id, price, closed.usage, cache)
            due = sum(line.amount_nanos for line in lines)
        except (UnpricedUsage, ValueError) as error:
            yield Finding("R7", closed.request_id, f"cannot be priced again: {error}")
            continue
        if min(due, closed.hold_nanos) != closed.cost_nanos:
            yield _differ("R7", closed.request_id, "charged", closed.cost_nanos, due)
    yield from _steps_were_priced(connection, in_force, cache)


def _steps_were_priced(
    connection: Connection,
    in_force: Callable[[str, int, datetime], int | None],
    cache: PriceCache,
) -> Iterator[Finding]:
    """R7: each step of a workflow run has the price in force for its model at acceptance, and its
    charge, if any, is this price applied to its usage."""
    query = select(receipt_steps, receipts.c.account_id, receipts.c.accepted_at).join(
        receipts, receipts.c.request_id == receipt_steps.c.request_id
    )
    for row in connection.execute(query, execution_options={"yield_per": 1000}).mappings():
        subject = f"{row['request_id']} step {row['name']}"
        moment = row["accepted_at"]
        own = in_force(row["model"], row["account_id"], moment)
        if row["price_id"] != (own or in_force(row["model"], LIST, moment)):
            yield Finding("R7", subject, f"price {row['price_id']} was not in force when accepted")
        if charged := row["charge_nanos"]:
            usage = msgspec.convert(row["usage"], Usage)
            due = charge(read_price(connection, row["price_id"], cache), usage).total_nanos
            if due != charged:
                yield _differ("R7", subject, "charged", charged, due)


def _lots_are_the_balance(connection: Connection) -> Iterator[Finding]:
    """R8: an account's lots sum to its balance, or to zero if the balance is negative."""
    left = (
        select(exact_sum(lots.c.remaining_nanos))
        .where(lots.c.account_id == accounts.c.id)
        .scalar_subquery()
    )
    query = select(accounts.c.id, accounts.c.posted_nanos, left.label("left")).where(
        accounts.c.kind == "customer"
    )
    for row in connection.execute(query):
        if row.left != max(row.posted_nanos, 0):
            yield _differ(
                "R8", f"account {row.id}", "lots hold", row.left, max(row.posted_nanos, 0)
            )


def _windows_are_sums(connection: Connection) -> Iterator[Finding]:
    """R9: a budget window's held and spent amounts are those of its requests."""
    held: defaultdict[tuple[int, int], int] = defaultdict(int)
    spent: defaultdict[tuple[int, int], int] = defaultdict(int)
    given = (
        select(exact_sum(refunds.c.amount_nanos))
        .where(refunds.c.request_id == receipts.c.request_id)
        .scalar_subquery()
    )
    for table, amount, sums in (
        (holds, holds.c.hold_nanos, held),
        (receipts, receipts.c.charge_nanos - given, spent),
    ):
        query = select(table.c.windows, amount).where(table.c.windows.is_not(None))
        for windows, nanos in connection.execute(query, execution_options={"yield_per": 1000}):
            for budget_id, starts_us in windows:
                sums[budget_id, starts_us] += nanos
    for row in connection.execute(select(archived_windows)):
        spent[row.budget_id, row.starts_us] += row.charge_nanos
    known = set()
    for row in connection.execute(select(budget_windows)):
        place = (row.budget_id, row.starts_us)
        known.add(place)
        for what, stored, due in (
            ("held", row.held_nanos, held[place]),
            ("spent", row.spent_nanos, spent[place]),
        ):
            if stored != due:
                yield _differ("R9", f"budget {place[0]} window {place[1]}", what, stored, due)
    for place in sorted(({*held} | {*spent}) - known):
        yield Finding("R9", f"budget {place[0]} window {place[1]}", "is missing but has requests")


def _balances_follow_transfers(connection: Connection) -> Iterator[Finding]:
    """R11: in order of versions, each transfer changed its account's balance by its amount.

    Archived charges are one entry; those among them that are transfers again are a part of it.
    """
    none = cast(None, BigInteger)
    inward = select(
        transfers.c.to_account.label("account"),
        transfers.c.amount_nanos.label("amount"),
        transfers.c.account_version.label("version"),
        transfers.c.posted_after.label("after"),
        transfers.c.id,
        none.label("until"),
        none.label("returned"),
    )
    outward = select(
        transfers.c.from_account,
        -transfers.c.amount_nanos,
        transfers.c.account_version,
        transfers.c.posted_after,
        transfers.c.id,
        none,
        none,
    )
    carried = archived_charges.c
    archived = select(
        carried.account_id,
        -carried.amount_nanos,
        carried.first_version,
        carried.posted_after,
        carried.transfer_id,
        carried.last_version,
        carried.returned_nanos,
    )
    moves = inward.union_all(outward, archived).subquery()
    query = (
        select(moves)
        .join(accounts, accounts.c.id == moves.c.account)
        .where(accounts.c.kind == "customer")
        .order_by(moves.c.account, moves.c.version, moves.c.until.is_(None), moves.c.id)
    )
    account, version, balance = None, 0, 0
    until, returned = 0, 0
    for row in connection.execute(query, execution_options={"yield_per": 1000}):
        if returned and (row.account != account or row.version > until):
            yield _returned_differ(account, until, returned)
            returned = 0
        if row.account != account:
            account, version, balance, until = row.account, 0, 0, 0
        if row.until is None and row.version <= until:
            returned += row.amount
            continue
        if row.version <= version:
            yield Finding("R11", f"transfer {row.id}", f"repeats the version {row.version}")
        if row.after != balance + row.amount:
            yield _differ("R11", f"transfer {row.id}", "left", row.after, balance + row.amount)
        version, balance = row.until or row.version, row.after
        if row.until is not None:
            until, returned = row.until, row.returned
    if returned:
        yield _returned_differ(account, until, returned)


def _references_exist(connection: Connection) -> Iterator[Finding]:
    """R14: each reference to a receipt or a transfer has its row. On PostgreSQL these tables have
    partitions, and no foreign key refers to them."""
    for column, target in (
        (receipts.c.transfer_id, transfers.c.id),
        (refunds.c.transfer_id, transfers.c.id),
        (lots.c.transfer_id, transfers.c.id),
        (payments.c.transfer_id, transfers.c.id),
        (refunds.c.request_id, receipts.c.request_id),
        (receipt_steps.c.request_id, receipts.c.request_id),
        (outputs.c.request_id, receipts.c.request_id),
        (webhook_deliveries.c.request_id, receipts.c.request_id),
    ):
        lost = select(column).where(column.is_not(None), ~exists().where(target == column))
        for value in connection.execute(lost.distinct()).scalars():
            yield Finding(
                "R14", f"{column.table.name} {value}", f"refers to no row of {target.table.name}"
            )


_RULES: Final[tuple[Callable[[Connection], Iterator[Finding]], ...]] = (
    _sums_to_zero,
    _posted_is_sum_of_transfers,
    _held_is_sum_of_holds,
    _charges_are_sums_of_receipts,
    _open_or_closed,
    _prices_were_in_force,
    _refunds_are_part_of_charges,
    _lots_are_the_balance,
    _windows_are_sums,
    _balances_follow_transfers,
    _references_exist,
)


def _balance() -> ColumnElement[int]:
    """SQL expression: an account's balance according to its transfers."""
    moved = case(
        (transfers.c.to_account == accounts.c.id, transfers.c.amount_nanos),
        else_=-transfers.c.amount_nanos,
    )
    return (
        select(wide_sum(moved))
        .where(
            or_(transfers.c.from_account == accounts.c.id, transfers.c.to_account == accounts.c.id)
        )
        .scalar_subquery()
        .label("balance")
    )


def _carried(connection: Connection) -> defaultdict[int, int]:
    """Sum the archived charges that are not in ``transfers``, by account."""
    carried: defaultdict[int, int] = defaultdict(int)
    amount = wide_sum(archived_charges.c.amount_nanos - archived_charges.c.returned_nanos)
    by_account = select(archived_charges.c.account_id, amount).group_by(
        archived_charges.c.account_id
    )
    for account_id, nanos in connection.execute(by_account):
        carried[account_id] -= nanos
        carried[SYSTEM_ACCOUNTS["revenue"]] += nanos
    return carried


def _returned_differ(account: int | None, version: int, nanos: int) -> Finding:
    return Finding(
        "R11",
        f"account {account}",
        f"the archived charges up to version {version} are in the ledger again with "
        f"{format_usd(abs(nanos))} {'less' if nanos > 0 else 'more'} than is recorded",
    )


def _differ(rule: str, subject: str, what: str, stored: int, due: int) -> Finding:
    return Finding(
        rule, subject, f"{what} {format_usd(stored)}, but it should be {format_usd(due)}"
    )
