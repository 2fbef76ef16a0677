"""Accounts: the parties that pay. Their balances change only through the ledger."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, insert, or_, select, update

from gateway.accounts.budgets import read_zone
from gateway.accounts.locks import lock_accounts
from gateway.checks.decoding import ID_MAX, read_id
from gateway.checks.entered import check_account_name, check_amount
from gateway.errors import Conflict
from gateway.pricing import format_usd
from gateway.tables.core import accounts

Status: TypeAlias = Literal["active", "suspended", "closed"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
SORTED_MAX: Final = 20_000
"""Maximum number of accounts that are sorted by what they have available."""


@dataclass(frozen=True, slots=True)
class Account:
    id: int
    name: str
    status: str
    posted_nanos: int
    held_nanos: int
    credit_limit_nanos: int
    allowance_nanos: int
    report_tz: str
    created_at: datetime
    keep_inputs: bool
    """Whether what is sent with its requests is kept as long as their outputs."""

    @property
    def available_nanos(self) -> int:
        """Amount that new requests can hold."""
        return self.posted_nanos - self.held_nanos + self.credit_limit_nanos


class NearZero(NamedTuple):
    """Accounts by what they have available; ``is_part`` if only the newest were sorted."""

    accounts: list[Account]
    is_part: bool


class AccountExists(Exception):
    """The name is taken by another account."""


class AmbiguousAccount(Conflict):
    """The name of one account is the number of another."""

    def __init__(self, asked: str, found: Sequence[Account]) -> None:
        each = " and ".join(f"{account.name!r} (id:{account.id})" for account in found)
        super().__init__(
            "account_ambiguous",
            f"{asked!r} can be {each}; write id: followed by the number of the one that you mean, "
            "and rename the other.",
            param="account",
            details={"accounts": [{"id": each.id, "name": each.name} for each in found]},
        )


def create_account(connection: Connection, name: str, *, credit_limit_nanos: int = 0) -> Account:
    """Open an account with a balance of zero.

    Raise ``AccountExists`` if the name is taken, ``ValueError`` if the name is not valid or the
    credit limit is negative or too large.
    """
    check_account_name(name)
    check_amount(credit_limit_nanos, "the credit limit", least=0)
    if connection.execute(select(accounts.c.id).where(accounts.c.name == name)).first():
        raise AccountExists(f"the account {name!r} already exists")
    row = connection.execute(
        insert(accounts)
        .values(
            name=name,
            kind="customer",
            credit_limit_nanos=credit_limit_nanos,
            created_at=datetime.now(UTC),
        )
        .returning(accounts)
    )
    return _account(row.mappings().one())


def find_account(connection: Connection, name_or_id: str | int) -> Account:
    """Find a customer account by its name or number; ``id:30`` is always a number.

    Raise ``LookupError`` if it does not exist, ``AmbiguousAccount`` if the name of one account is
    the number of another: such names were once accepted.
    """
    found = find_accounts(connection, name_or_id)
    if not found:
        raise LookupError(f"unknown account {name_or_id!r}")
    if len(found) > 1:
        raise AmbiguousAccount(str(name_or_id), found)
    return found[0]


def find_accounts(connection: Connection, name_or_id: str | int) -> list[Account]:
    """Find all customer accounts that a name or number can refer to, ordered by number."""
    number = name_or_id if isinstance(name_or_id, int) else read_id(name_or_id.removeprefix("id:"))
    conditions: list[ColumnElement[bool]] = []
    if number is not None and 0 < number <= ID_MAX:
        conditions.append(accounts.c.id == number)
    if isinstance(name_or_id, str) and not name_or_id.startswith("id:"):
        conditions.append(accounts.c.name == name_or_id)
    if not conditions:
        return []
    rows = connection.execute(
        select(accounts)
        .where(accounts.c.kind == "customer", or_(*conditions))
        .order_by(accounts.c.id)
    )
    return [_account(row) for row in rows.mappings()]


def change_account(
    connection: Connection,
    account_id: int,
    *,
    credit_limit_nanos: int | None = None,
    allowance_nanos: int | None = None,
    status: Status | None = None,
    report_tz: str | None = None,
    name: str | None = None,
    keep_inputs: bool | None = None,
) -> Account:
    """Change the attributes that are given.

    A credit limit cannot be set below what is already owed and held. A suspended or closed account
    accepts no new requests; running requests end as usual. Raise ``LookupError`` if the account
    does not exist, ``AccountExists`` if the name is taken, ``ValueError`` if a value is not valid.
    """
    account = lock_accounts(connection, [account_id]).get(account_id)
    if account is None:
        raise LookupError(f"unknown account {account_id}")
    changes: dict[str, object] = {}
    if name is not None:
        check_account_name(name)
        other = select(accounts.c.id).where(accounts.c.name == name, accounts.c.id != account_id)
        if connection.execute(other).first():
            raise AccountExists(f"the account {name!r} already exists")
        changes["name"] = name
    if credit_limit_nanos is not None:
        check_amount(credit_limit_nanos, "the credit limit", least=0)
        needed = account["held_nanos"] - account["posted_nanos"]
        if credit_limit_nanos < max(needed, 0):
            raise ValueError(
                f"the credit limit cannot be ${format_usd(credit_limit_nanos)}: "
                f"${format_usd(max(needed, 0))} of it is in use"
            )
        changes["credit_limit_nanos"] = credit_limit_nanos
    if allowance_nanos is not None:
        changes["allowance_nanos"] = check_amount(allowance_nanos, "an allowance", least=0)
    if status is not None:
        if status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; use {', '.join(STATUSES)}")
        changes["status"] = status
    if report_tz is not None:
        changes["report_tz"] = read_zone(report_tz).key
    if keep_inputs is not None:
        changes["keep_inputs"] = keep_inputs
    if changes:
        connection.execute(update(accounts).where(accounts.c.id == account_id).values(**changes))
    return find_account(connection, account_id)


def list_accounts(
    connection: Connection,
    *,
    status: Status | None = None,
    name: str | None = None,
    limit: int | None = None,
    after: int = 0,
) -> list[Account]:
    """List customer accounts in order of their numbers, those greater than ``after``.

    ``name`` is the start of a name.
    """
    query = select(accounts).where(accounts.c.kind == "customer", accounts.c.id > after)
    if status is not None:
        query = query.where(accounts.c.status == status)
    if name is not None:
        query = query.where(accounts.c.name.startswith(name, autoescape=True))
    rows = connection.execute(query.order_by(accounts.c.id).limit(limit))
    return [_account(row) for row in rows.mappings()]


def accounts_near_zero(
    connection: Connection,
    *,
    status: Status | None = None,
    name: str | None = None,
    limit: int,
    after: tuple[int, int] | None = None,
) -> NearZero:
    """List customer accounts by what they have available, the least first. ``after``: available
    amount and number of the last one on the page before.

    No index has this order, because it would be written with every hold and every charge. So the
    newest ``SORTED_MAX`` accounts are sorted.
    """
    of_filter = [accounts.c.kind == "customer"]
    if status is not None:
        of_filter.append(accounts.c.status == status)
    if name is not None:
        of_filter.append(accounts.c.name.startswith(name, autoescape=True))
    newest = select(accounts).where(*of_filter).order_by(accounts.c.id.desc())
    beyond = newest.with_only_columns(accounts.c.id).offset(SORTED_MAX).limit(1).scalar_subquery()
    some = newest.limit(SORTED_MAX).subquery()
    available = some.c.posted_nanos - some.c.held_nanos + some.c.credit_limit_nanos
    query = select(some, beyond.is_not(None).label("is_part"))
    if after is not None:
        nanos, number = after
        same = and_(available == nanos, some.c.id > number)
        query = query.where(or_(available > nanos, same))
    rows = connection.execute(query.order_by(available, some.c.id).limit(limit)).mappings().all()
    return NearZero([_account(row) for row in rows], bool(rows) and rows[0]["is_part"])


def account_names(connection: Connection, ids: Collection[int]) -> dict[int, str]:
    """Return the names of accounts by their numbers."""
    query = select(accounts.c.id, accounts.c.name).where(accounts.c.id.in_(sorted(ids)))
    return {row.id: row.name for row in connection.execute(query)}


def _account(row: RowMapping) -> Account:
    return Account(
        id=row["id"],
        name=row["name"],
        status=row["status"],
        posted_nanos=row["posted_nanos"],
        held_nanos=row["held_nanos"],
        credit_limit_nanos=row["credit_limit_nanos"],
        allowance_nanos=row["allowance_nanos"],
        report_tz=row["report_tz"],
        created_at=row["created_at"],
        keep_inputs=row["keep_inputs"],
    )
