"""Time-dependent credit: monthly allowances, and lots that expire.

The key of its transfer ensures that an allowance is given once a month. An expired lot is debited
by what is left of it, except for the part that open holds may need; that part is tried again later.
Granted credit returns to ``promo``, paid credit becomes ``breakage``.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, String, cast, literal, select

from gateway.accounts.locks import lock_accounts
from gateway.ledger.lots import consume_lot
from gateway.ledger.periods import (
    Clock,
    booking_time,
    month_of,
    next_month,
    starts_at,
    utc_now,
)
from gateway.ledger.transfers import add_credit, move
from gateway.tables.core import SYSTEM_ACCOUNTS, accounts, lots, transfers
from gateway.tables.settlement_time import LEAD


def give_allowances(
    connection: Connection, now: datetime, *, limit: int = 500, clock: Clock = utc_now
) -> int:
    """Give this month's allowance to active accounts that have not received it yet.

    Return the number of accounts; call again while it is ``limit``.
    """
    month = month_of(now)
    name = literal("free:") + cast(accounts.c.id, String) + literal(f":{month}")
    # Those of earlier months have other keys.
    since = starts_at(month) - LEAD
    given = select(transfers.c.id).where(transfers.c.key == name, transfers.c.booked_at >= since)
    due = connection.execute(
        select(accounts.c.id, accounts.c.allowance_nanos)
        .where(accounts.c.allowance_nanos > 0, accounts.c.status == "active", ~given.exists())
        .order_by(accounts.c.id)
        .limit(limit)
    ).all()
    for row in due:
        add_credit(
            connection,
            row.id,
            row.allowance_nanos,
            kind="grant",
            key=f"free:{row.id}:{month}",
            actor="calendar",
            reason=f"allowance of {month}",
            lot="free",
            expires_at=starts_at(next_month(month)),
            clock=clock,
        )
    return len(due)


def expire_lots(
    connection: Connection, now: datetime, *, limit: int = 500, clock: Clock = utc_now
) -> int:
    """Debit what is left of expired lots; return the number of lots that were emptied.

    A lot whose money is held stays open with that part, and is tried again.
    """
    overdue = connection.execute(
        select(lots.c.id, lots.c.account_id)
        .where(lots.c.remaining_nanos > 0, lots.c.expires_at <= now)
        .order_by(lots.c.id)
        .limit(limit)
    ).all()
    if not overdue:
        return 0
    booked_at = booking_time(connection, clock)
    lock_accounts(connection, {row.account_id for row in overdue})
    return sum(_expire_lot(connection, row.id, row.account_id, booked_at) for row in overdue)


def _expire_lot(connection: Connection, lot_id: int, account_id: int, booked_at: datetime) -> bool:
    """Expire one lot of a locked account as far as its money is not held. True if it is empty."""
    account = lock_accounts(connection, [account_id])[account_id]
    lot = connection.execute(select(lots).where(lots.c.id == lot_id)).mappings().one()
    amount = min(lot["remaining_nanos"], max(account["posted_nanos"] - account["held_nanos"], 0))
    if not amount:
        return False
    part = lot["amount_nanos"] - lot["remaining_nanos"]
    move(
        connection,
        account,
        -amount,
        SYSTEM_ACCOUNTS["breakage" if lot["kind"] == "paid" else "promo"],
        kind="expiry",
        key=f"expiry:{lot_id}:{part}",
        actor="calendar",
        reason=f"credit of {lot['created_at'].date().isoformat()} expired",
        now=booked_at,
    )
    consume_lot(connection, lot_id, amount)
    return bool(amount == lot["remaining_nanos"])
