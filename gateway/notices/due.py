"""Finds what is due to be told: budgets passed, keys and credit that expire, credit nearly used up.

A budget of an organisation is told to each of its accounts, because it bounds them, and to the
operator.

Requests do not pay for it: a scheduled task reads the windows, keys and lots of accounts with
subscriptions. What began or ended within ``LOOK_BACK`` is found as well, so nothing is missed while
no gateway runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, func, select

from gateway.accounts.budgets import (
    Budget,
    Window,
    budgets_in_force,
    list_budgets,
    window_end,
)
from gateway.accounts.keys import successors
from gateway.accounts.organisations import organisations_of
from gateway.checks.moments import EPOCH, microseconds_of, moment_of, timestamp
from gateway.notices.kinds import OPERATOR, Notice, in_words
from gateway.notices.store import known_keys
from gateway.notices.subscriptions import subscriptions_of
from gateway.pricing import format_usd
from gateway.sql.database import exact_sum
from gateway.tables.core import accounts, budget_windows, keys, lots, transfers

THRESHOLDS: Final = (50, 80, 100)
"""Percentages of a budget's limit."""
SOON: Final = (timedelta(days=7), timedelta(days=1))
"""Times before an expiry at which it is announced."""
LOOK_BACK: Final = timedelta(days=1)
ROWS: Final = 1000
"""Rows that one statement reads."""

_LENGTHS: Final[dict[Window, timedelta]] = {
    "hour": timedelta(hours=2),
    "day": timedelta(days=2),
    "month": timedelta(days=32),
}
"""Upper bounds of the lengths of windows, whatever their time zone."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """An account that gets notices."""

    id: int
    name: str
    posted_nanos: int
    credit_limit_nanos: int


def due_notices(
    connection: Connection,
    account_ids: Collection[int],
    now: datetime,
    *,
    credit_low_nanos: int | None,
) -> list[Notice]:
    """Return what some accounts are to be told now, without what they were told before.

    Without ``credit_low_nanos``, no account is told that its credit is nearly used up.
    """
    subscribed = subscriptions_of(connection, account_ids)
    rows = connection.execute(
        select(
            accounts.c.id, accounts.c.name, accounts.c.posted_nanos, accounts.c.credit_limit_nanos
        ).where(accounts.c.id.in_(sorted(subscribed)), accounts.c.status != "closed")
    )
    owners = {row.id: _Owner(*row) for row in rows}

    def wanting(*kinds: str) -> dict[int, _Owner]:
        return {
            id: owner
            for id, owner in owners.items()
            if any(one.wants(kind) for one in subscribed[id] for kind in kinds)
        }

    budgeted = wanting("budget.passed")
    if any(one.wants("budget.passed") for one in subscribed.get(OPERATOR, ())):
        budgeted[OPERATOR] = _Owner(OPERATOR, "the installation", 0, 0)
    finders: tuple[tuple[Callable[..., Iterator[Notice]], dict[int, _Owner]], ...] = (
        (_budgets_passed, budgeted),
        (_keys_expiring, wanting("key.expiring", "key.expired")),
        (_credit_expiring, wanting("credit.expiring")),
    )
    found = [each for find, some in finders if some for each in find(connection, some, now)]
    if credit_low_nanos is not None:
        found += _credit_low(connection, wanting("credit.low"), credit_low_nanos)
    known = known_keys(connection, [each.key for each in found])
    return [each for each in found if each.key not in known]


def _budgets_passed(
    connection: Connection, owners: dict[int, _Owner], now: datetime
) -> Iterator[Notice]:
    own = [id for id in owners if id != OPERATOR]
    groups = {id: [group.id] for id, group in organisations_of(connection, own).items()}
    found = budgets_in_force(connection, own, groups)
    if OPERATOR in owners:
        found[OPERATOR] = list_budgets(connection, organisations_only=True)
    by_id = {budget.id: budget for some in found.values() for budget in some}
    receivers: dict[int, list[_Owner]] = {}
    for id, some in found.items():
        for budget in some:
            receivers.setdefault(budget.id, []).append(owners[id])
    for row in _windows(connection, list(by_id.values()), now):
        budget = by_id[row.budget_id]
        starts_at = moment_of(row.starts_us)
        ends_at = window_end(budget.window, budget.tz, starts_at)
        if row.spent_nanos > 0 and (ends_at is None or ends_at > now - LOOK_BACK):
            for percent in THRESHOLDS:
                if row.spent_nanos * 100 >= budget.limit_nanos * percent:
                    for owner in receivers[budget.id]:
                        yield _budget_passed(owner, budget, percent, row, starts_at, ends_at)


def _windows(connection: Connection, found: Sequence[Budget], now: datetime) -> Iterator[Any]:
    """Read the windows of budgets that have not ended, or ended a short time ago."""
    table = budget_windows
    for window in {budget.window for budget in found}:
        since = now - LOOK_BACK - _LENGTHS[window] if window in _LENGTHS else EPOCH
        ids = [budget.id for budget in found if budget.window == window]
        for start in range(0, len(ids), ROWS):
            yield from connection.execute(
                select(table.c.budget_id, table.c.starts_us, table.c.spent_nanos).where(
                    table.c.budget_id.in_(ids[start : start + ROWS]),
                    table.c.starts_us >= microseconds_of(since),
                )
            ).all()


def _budget_passed(
    owner: _Owner,
    budget: Budget,
    percent: int,
    row: Any,
    starts_at: datetime,
    ends_at: datetime | None,
) -> Notice:
    name = f"Budget {budget.id}" + (f" “{budget.name}”" if budget.name else "")
    covered = [
        *([f"key {budget.key_id}"] if budget.key_id is not None else []),
        *([f"model {budget.model}"] if budget.model is not None else []),
    ]
    shared = budget.organisation
    whose = owner.name if shared is None else shared
    key = f"budget:{budget.id}:{row.starts_us}:{budget.limit_nanos}:{percent}"
    spent, limit = format_usd(row.spent_nanos), format_usd(budget.limit_nanos)
    span = (
        "since it was created"
        if ends_at is None
        else f"in the {budget.window} from {in_words(starts_at)} to {in_words(ends_at)}"
    )
    effect = (
        "It is a hard budget: requests that could exceed it are refused."
        if budget.hard
        else "It is a soft budget: requests continue to be accepted."
    )
    return Notice(
        # With the limit: after a change of it, the same percentage is another amount.
        key=key if shared is None else f"{key}:{owner.id}",
        account_id=owner.id,
        kind="budget.passed",
        subject=f"budget {budget.id}",
        title=f"{name} of {whose} passed {percent} % of its limit",
        text=(
            f"{name} of {'account' if shared is None else 'organisation'} {whose}"
            + (f", for {' and '.join(covered)}," if covered else "")
            + f" passed {percent} % of its limit: ${spent} of ${limit} were spent {span}. {effect}"
        ),
        data={
            "budget_id": budget.id,
            "name": budget.name,
            "organisation": shared,
            "key_id": budget.key_id,
            "model": budget.model,
            "window": budget.window,
            "hard": budget.hard,
            "percent": percent,
            "spent": spent,
            "limit": limit,
            "starts_at": None if ends_at is None else timestamp(starts_at),
            "ends_at": None if ends_at is None else timestamp(ends_at),
        },
        lasting=ends_at is None,
    )


def _keys_expiring(
    connection: Connection, owners: dict[int, _Owner], now: datetime
) -> Iterator[Notice]:
    query = (
        select(
            keys.c.id,
            keys.c.account_id,
            keys.c.name,
            keys.c.prefix,
            keys.c.created_at,
            keys.c.expires_at,
        )
        .where(
            keys.c.account_id.in_(sorted(owners)),
            keys.c.expires_at > now - LOOK_BACK,
            keys.c.expires_at <= now + max(SOON),
            keys.c.revoked_at.is_(None),
        )
        .order_by(keys.c.id)
        .limit(ROWS)
    )
    after = 0
    while page := connection.execute(query.where(keys.c.id > after)).all():
        after = page[-1].id
        replaced_by = successors(connection, [row.id for row in page])
        for row in page:
            stage = _stage(row.created_at, row.expires_at, now)
            if stage is not None:
                yield _key_expiring(owners[row.account_id], row, stage, replaced_by.get(row.id))


def _key_expiring(owner: _Owner, row: Any, stage: timedelta, replaced_by: int | None) -> Notice:
    name = f"Key {row.id}" + (f" “{row.name}”" if row.name else "")
    expired = stage <= timedelta(0)
    verb, when = ("expired", "") if expired else ("expires", f" within {_in_days(stage)}")
    effect = "Requests with it are refused" if expired else "From then on, requests are refused"
    follow = (
        f"Key {replaced_by} replaces it."
        if replaced_by is not None
        else "It was not replaced: create or rotate a key if it is still in use."
    )
    return Notice(
        key=f"key:{row.id}:{microseconds_of(row.expires_at)}:{stage.days}",
        account_id=owner.id,
        kind="key.expired" if expired else "key.expiring",
        subject=f"key {row.id}",
        title=f"{name} of {owner.name} {verb}{when}",
        text=(
            f"{name} ({row.prefix}…) of account {owner.name} {verb} at {in_words(row.expires_at)}. "
            f"{effect} with 401 key_expired. {follow}"
        ),
        data={
            "key_id": row.id,
            "name": row.name,
            "prefix": row.prefix,
            "expires_at": timestamp(row.expires_at),
            "replaced_by": replaced_by,
        },
    )


def _credit_expiring(
    connection: Connection, owners: dict[int, _Owner], now: datetime
) -> Iterator[Notice]:
    rows = connection.execute(
        select(
            lots.c.account_id,
            lots.c.expires_at,
            exact_sum(lots.c.remaining_nanos).label("nanos"),
            func.min(lots.c.created_at).label("created_at"),
        )
        .where(
            lots.c.account_id.in_(sorted(owners)),
            lots.c.remaining_nanos > 0,
            lots.c.expires_at > now,
            lots.c.expires_at <= now + max(SOON),
            # Allowances expire every month, and the next one replaces them.
            lots.c.kind != "free",
        )
        .group_by(lots.c.account_id, lots.c.expires_at)
    )
    for row in rows.all():
        stage = _stage(row.created_at, row.expires_at, now)
        if stage is None:
            continue
        owner, amount = owners[row.account_id], format_usd(row.nanos)
        yield Notice(
            key=f"credit:{owner.id}:{microseconds_of(row.expires_at)}:{stage.days}",
            account_id=owner.id,
            kind="credit.expiring",
            subject=f"account {owner.id}",
            title=f"${amount} of the credit of {owner.name} expires within {_in_days(stage)}",
            text=(
                f"${amount} of the credit of account {owner.name} expires at "
                f"{in_words(row.expires_at)}. Credit that expires first is used first; what is "
                "left at that moment is lost."
            ),
            data={"amount": amount, "expires_at": timestamp(row.expires_at)},
        )


def _credit_low(
    connection: Connection, owners: dict[int, _Owner], low_nanos: int
) -> Iterator[Notice]:
    left = {
        owner.id: owner.posted_nanos + owner.credit_limit_nanos
        for owner in owners.values()
        if owner.posted_nanos + owner.credit_limit_nanos < low_nanos
    }
    rows = connection.execute(
        select(transfers.c.to_account, func.max(transfers.c.id).label("id"))
        .where(transfers.c.to_account.in_(sorted(left)), transfers.c.kind.in_(("topup", "grant")))
        .group_by(transfers.c.to_account)
    )
    credits = {row.to_account: row.id for row in rows} if left else {}
    for account_id, nanos in left.items():
        name, amount = owners[account_id].name, format_usd(nanos)
        yield Notice(
            # Told again after the next credit.
            key=f"low:{account_id}:{credits.get(account_id, 0)}",
            account_id=account_id,
            kind="credit.low",
            subject=f"account {account_id}",
            title=f"The credit of {name} is nearly used up",
            text=(
                f"Account {name} has ${amount} left, its credit limit included, which is less than "
                f"${format_usd(low_nanos)}. Requests are refused with 402 insufficient_credit when "
                "it does not cover them. Add credit to continue."
            ),
            data={"left": amount, "threshold": format_usd(low_nanos)},
            lasting=True,
        )


def _stage(created_at: datetime, expires_at: datetime, now: datetime) -> timedelta | None:
    """Return how soon something expires: within 7 days, within a day, or 0 if it has expired.

    None if it is not announced, because it was created to exist for no longer than that.
    """
    life, left = expires_at - created_at, expires_at - now
    if left <= timedelta(0):
        return timedelta(0) if life > min(SOON) else None
    stage = min(soon for soon in SOON if left <= soon)
    return stage if life > stage else None


def _in_days(stage: timedelta) -> str:
    return "a day" if stage.days == 1 else f"{stage.days} days"
