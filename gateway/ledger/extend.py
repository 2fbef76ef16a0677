"""Extends holds while their requests run: streams without a token limit are held for in slices.

An extension is decided like a hold, under the same locks and limits. It is idempotent, because it
names the total amount to hold. A request that is stopped because its hold could not be extended is
marked, so that its receipt states the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from sqlalchemy import Connection, bindparam, select, update

from gateway.ledger.balances import Balances, lock_balances
from gateway.ledger.bounds import Bounds, BudgetExceeded, increase_holds
from gateway.ledger.holds import CreditInUse, InsufficientCredit, KeySpendLimit, shortage
from gateway.sql.statements import CompiledStatement, Row, any_of
from gateway.tables.core import holds
from workers.contract.jobs import RequestId


@dataclass(frozen=True, slots=True)
class Extension:
    """The total amount to hold for a request, and the output tokens that it covers."""

    request_id: RequestId
    hold_nanos: int
    held_tokens: int


@dataclass(frozen=True, slots=True)
class Extended:
    """The amount is held, by this call or an earlier one."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has been settled; there is nothing to extend."""


Shortage: TypeAlias = InsufficientCredit | CreditInUse | KeySpendLimit | BudgetExceeded
ExtendAnswer: TypeAlias = Extended | Ended | Shortage


@dataclass(frozen=True, slots=True)
class _More:
    """The part of an extension that is not held yet, as a ``BudgetedRequest``."""

    account_id: int
    key_id: int
    model: str
    hold_nanos: int
    accepted_at: datetime
    windows: Sequence[Sequence[int]]


_FIND: Final = CompiledStatement(
    select(
        holds.c.request_id,
        holds.c.account_id,
        holds.c.key_id,
        holds.c.model,
        holds.c.hold_nanos,
        holds.c.held_tokens,
        holds.c.windows,
        holds.c.accepted_at,
    ).where(any_of(holds.c.request_id, "ids"))
)
_EXTEND: Final = CompiledStatement(
    update(holds)
    .where(holds.c.request_id == bindparam("id"))
    .values(hold_nanos=bindparam("amount"), held_tokens=bindparam("tokens"))
)
_CUT: Final = (
    update(holds).where(holds.c.request_id == bindparam("id")).values(cut=bindparam("why"))
)


def extend(connection: Connection, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
    """Decide extensions in order, and extend the holds of those that are covered."""
    balances = lock_balances(connection, open=[each.request_id for each in extensions])
    answers = grow(connection, balances, extensions)
    balances.write(connection)
    return answers


def grow(
    connection: Connection, balances: Balances, extensions: Sequence[Extension]
) -> list[ExtendAnswer]:
    """Do what ``extend`` does, with locked balances that the caller writes."""
    ids = [extension.request_id for extension in extensions]
    rows = {row["request_id"]: row for row in _FIND.rows(connection, ids=ids)}
    before = {id: row["hold_nanos"] for id, row in rows.items()}
    answers = decide_extensions(connection, balances, rows, extensions)
    _EXTEND.run(
        connection,
        [
            {"id": id, "amount": row["hold_nanos"], "tokens": row["held_tokens"]}
            for id, row in rows.items()
            if row["hold_nanos"] != before[id]
        ],
    )
    return answers


def decide_extensions(
    connection: Connection,
    balances: Balances,
    rows: Mapping[str, Row],
    extensions: Sequence[Extension],
) -> list[ExtendAnswer]:
    """Decide extensions in order. Change balances and rows of ``holds`` in memory, and budgets'
    windows in SQL; the caller writes the others."""
    bounded = {row["account_id"] for row in rows.values() if row["windows"]}
    # A request counts where it was accepted, also if its account has left the organisation.
    organisations = balances.organisations.ever if bounded else {}
    bounds = Bounds(connection, [_more(row, 0) for row in rows.values()], bounded, organisations)
    grown: list[tuple[Sequence[Sequence[int]], int]] = []
    answers: list[ExtendAnswer] = []
    for extension in extensions:
        row = rows.get(extension.request_id)
        if row is None:
            answers.append(Ended())
            continue
        part = _more(row, max(extension.hold_nanos - row["hold_nanos"], 0))
        short = shortage(
            part.hold_nanos, balances.accounts[part.account_id], balances.keys[part.key_id]
        ) or bounds.exceeded(part)
        if short is not None:
            answers.append(short)
            continue
        if part.hold_nanos:
            row["hold_nanos"] = extension.hold_nanos
            row["held_tokens"] = extension.held_tokens
            balances.change(part.account_id, part.key_id, held=part.hold_nanos)
            bounds.add(part)
            grown.append((part.windows, part.hold_nanos))
        answers.append(Extended())
    increase_holds(connection, grown)
    return answers


def mark_cut(connection: Connection, request_id: RequestId, why: str) -> None:
    """Record why a request is about to be stopped. No effect if it has ended."""
    connection.execute(_CUT, {"id": request_id, "why": why})


def _more(row: Row, amount_nanos: int) -> _More:
    return _More(
        account_id=row["account_id"],
        key_id=row["key_id"],
        model=row["model"],
        hold_nanos=amount_nanos,
        accepted_at=row["accepted_at"],
        windows=row["windows"] or (),
    )


CUT_REASONS: Final = ("insufficient_credit", "key_spend_limit", "budget_exceeded")
"""Finish reasons of streams whose hold could not be extended, also on their receipts."""


def cut_reason(short: Shortage) -> str:
    """Return the finish reason of a stream whose hold could not be extended."""
    match short:
        case KeySpendLimit():
            return "key_spend_limit"
        case BudgetExceeded():
            return "budget_exceeded"
    return "insufficient_credit"
