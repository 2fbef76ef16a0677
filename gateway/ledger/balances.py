"""Balances of a batch: accounts and keys, locked by one statement and written once.

Holds, extensions and settlements change them in memory, so that each decision counts what the batch
has decided before. ``write`` adds the changes: one UPDATE of accounts, one of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, bindparam, func, select, union, union_all, update

from gateway.accounts.locks import LockedOrganisations, lock_organisations
from gateway.ids import is_request_id
from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import accounts, holds, keys, receipts


@dataclass(slots=True)
class AccountBalance:
    """A locked account, with the changes of the batch. ``version`` is that before them."""

    id: int
    status: str
    posted_nanos: int
    held_nanos: int
    credit_limit_nanos: int
    version: int
    bounded: bool
    open_requests: int
    organised: bool


@dataclass(slots=True)
class KeyBalance:
    """A locked key, with the changes of the batch."""

    id: int
    revoked_at: datetime | None
    expires_at: datetime | None
    spend_limit_nanos: int | None
    spent_nanos: int
    held_nanos: int
    open_requests: int


@dataclass(slots=True)
class _Change:
    held: int = 0
    charged: int = 0
    opened: int = 0


NO_ORGANISATIONS: Final = LockedOrganisations({}, {})

_ACCOUNT_COLUMNS: Final = tuple(accounts.c[name] for name in AccountBalance.__slots__)
_KEY_COLUMNS: Final = tuple(keys.c[name].label(f"key_{name}") for name in KeyBalance.__slots__)

_WANTED: Final = union(
    select(keys.c.account_id, keys.c.id.label("key_id")).where(any_of(keys.c.id, "keys")),
    select(holds.c.account_id, holds.c.key_id).where(any_of(holds.c.request_id, "open")),
).subquery("wanted")
_REPEATED: Final = union_all(
    select(holds.c.request_id).where(any_of(holds.c.request_id, "new")),
    select(receipts.c.request_id).where(
        any_of(receipts.c.request_id, "new"),
        # With the ends of the list, PostgreSQL opens their partitions only.
        receipts.c.request_id.between(bindparam("new_first"), bindparam("new_last")),
    ),
).subquery("repeated")
_LOCK: Final = CompiledStatement(
    select(
        select(func.count()).select_from(_REPEATED).scalar_subquery().label("repeated"),
        *_ACCOUNT_COLUMNS,
        *_KEY_COLUMNS,
    )
    .join_from(_WANTED, accounts, accounts.c.id == _WANTED.c.account_id)
    .join(keys, keys.c.id == _WANTED.c.key_id)
    # Each account before its keys, as in ``accounts.locks``.
    .order_by(_WANTED.c.account_id, _WANTED.c.key_id)
    # Rows that refer to an account or a key can be inserted meanwhile.
    .with_for_update(of=[accounts, keys], key_share=True)
)
_CHANGE_ACCOUNT: Final = CompiledStatement(
    update(accounts)
    .where(accounts.c.id == bindparam("account"))
    .values(
        posted_nanos=accounts.c.posted_nanos - bindparam("charged"),
        held_nanos=accounts.c.held_nanos + bindparam("held"),
        open_requests=accounts.c.open_requests + bindparam("opened"),
        version=accounts.c.version + 1,
    )
)
_CHANGE_KEY: Final = CompiledStatement(
    update(keys)
    .where(keys.c.id == bindparam("key"))
    .values(
        spent_nanos=keys.c.spent_nanos + bindparam("charged"),
        held_nanos=keys.c.held_nanos + bindparam("held"),
        open_requests=keys.c.open_requests + bindparam("opened"),
    )
)


class Balances:
    """``repeated``: whether any of the new requests can have been accepted before."""

    def __init__(self) -> None:
        self.accounts: dict[int, AccountBalance] = {}
        self.organisations = NO_ORGANISATIONS
        self.keys: dict[int, KeyBalance] = {}
        self.repeated = False
        self._of_accounts: dict[int, _Change] = {}
        self._of_keys: dict[int, _Change] = {}

    def change(
        self, account_id: int, key_id: int, *, held: int = 0, charged: int = 0, opened: int = 0
    ) -> None:
        """Count amounts that are held (or, if negative, released) and charged, and requests that
        begin or end."""
        account, key = self.accounts[account_id], self.keys[key_id]
        account.held_nanos += held
        account.posted_nanos -= charged
        account.open_requests += opened
        key.held_nanos += held
        key.spent_nanos += charged
        key.open_requests += opened
        for changes, id in ((self._of_accounts, account_id), (self._of_keys, key_id)):
            change = changes.get(id)
            if change is None:
                change = changes[id] = _Change()
            change.held += held
            change.charged += charged
            change.opened += opened

    def write(self, connection: Connection) -> None:
        """Add the changes to the rows; without changes, do nothing."""
        for statement, name, changes in (
            (_CHANGE_ACCOUNT, "account", self._of_accounts),
            (_CHANGE_KEY, "key", self._of_keys),
        ):
            statement.run(
                connection,
                [
                    {name: id, "held": each.held, "charged": each.charged, "opened": each.opened}
                    for id, each in sorted(changes.items())
                    if each.held or each.charged or each.opened
                ],
            )


def lock_balances(
    connection: Connection,
    *,
    new: Sequence[str] = (),
    keys: Iterable[int] = (),
    open: Sequence[str] = (),
) -> Balances:
    """Lock the accounts and keys of a batch: these keys, and those of open requests. Then lock the
    organisations of these accounts.

    ``new`` are the requests to be accepted. An open request whose hold is gone is left out.
    """
    found = Balances()
    # The database orders other texts differently, so a request with such an id can be repeated.
    unusual = not all(map(is_request_id, new))
    rows = _LOCK.rows(
        connection,
        new=new,
        new_first=min(new, default=None),
        new_last=max(new, default=None),
        keys=sorted(keys),
        open=open,
    )
    organised: set[int] = set()
    for row in rows:
        repeated, *values = row.values()
        account = AccountBalance(*values[: len(_ACCOUNT_COLUMNS)])
        key = KeyBalance(*values[len(_ACCOUNT_COLUMNS) :])
        found.repeated = unusual or bool(repeated)
        found.accounts.setdefault(account.id, account)
        found.keys[key.id] = key
        if account.organised:
            organised.add(account.id)
    if organised:
        found.organisations = lock_organisations(connection, organised)
    return found
