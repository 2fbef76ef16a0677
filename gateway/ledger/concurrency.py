"""Limits on concurrent requests (queued or running) of accounts and keys, configured or default.

The rows of accounts and keys count their open requests, updated by the statements that update the
held amounts, so these limits cost no query. Requests per model are counted only for accounts that
have a limit for a model. Batch lines are not counted: batches have a separate limit, so that they
cannot use up the concurrency of interactive requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy import Connection, Table, func, select, update

from gateway.accounts.locks import lock_accounts
from gateway.ledger.balances import Balances
from gateway.pricing import ServiceClass
from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import accounts, holds, keys, rate_limits

COUNTED: Final = "standard"
"""The service class whose requests are counted."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default maximum of concurrent requests of an account and of a key; 0 is unlimited."""

    account: int = 0
    key: int = 0


UNBOUNDED: Final = Defaults()


@dataclass(frozen=True, slots=True)
class TooManyConcurrent:
    """The account, key or model (``what``) already has ``limit`` open requests."""

    what: str
    limit: int


class CountedRequest(Protocol):
    """A request to be accepted: the fields that concurrency limits depend on."""

    @property
    def account_id(self) -> int: ...
    @property
    def key_id(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def service_class(self) -> ServiceClass: ...


_LIMITS: Final = CompiledStatement(
    select(
        rate_limits.c.account_id,
        rate_limits.c.key_id,
        rate_limits.c.model,
        rate_limits.c.concurrent_max,
    ).where(
        any_of(rate_limits.c.account_id, "accounts"),
        rate_limits.c.concurrent_max.is_not(None),
    )
)
_OF_MODELS: Final = CompiledStatement(
    select(holds.c.account_id, holds.c.key_id, holds.c.model, func.count().label("requests"))
    .where(any_of(holds.c.account_id, "accounts"), holds.c.service_class == COUNTED)
    .group_by(holds.c.account_id, holds.c.key_id, holds.c.model)
)
_OPEN: Final = (
    select(holds.c.account_id, holds.c.key_id, func.count().label("requests"))
    .where(holds.c.service_class == COUNTED)
    .group_by(holds.c.account_id, holds.c.key_id)
)
_NO_LIMIT: Final[Mapping[tuple[int, str], int]] = {}
_NO_LIMITS: Final[Mapping[int, Mapping[tuple[int, str], int]]] = {}


def open_by_key(connection: Connection, account_id: int) -> dict[tuple[int, str], int]:
    """Return how many requests of an account are open, by key and model."""
    rows = connection.execute(
        select(holds.c.key_id, holds.c.model, func.count().label("requests"))
        .where(holds.c.account_id == account_id, holds.c.service_class == COUNTED)
        .group_by(holds.c.key_id, holds.c.model)
    )
    return {(row.key_id, row.model): row.requests for row in rows}


class OpenRequests:
    """Limits on the open requests of locked accounts and keys, while a batch is decided."""

    def __init__(
        self,
        connection: Connection,
        balances: Balances,
        defaults: Defaults,
        bounded: Collection[int],
        *,
        batch: int,
    ) -> None:
        """Read the limits of accounts that have any (``bounded``); others cost no query.

        ``batch`` is the number of requests to decide. If the limits leave room for all of them,
        none is checked.
        """
        self._balances = balances
        self._defaults = defaults
        self._limits: Mapping[int, Mapping[tuple[int, str], int]] = _NO_LIMITS
        self._of_models: dict[tuple[int, int, str], int] = {}
        self._checks = any(
            0 < defaults.account < account.open_requests + batch
            for account in balances.accounts.values()
        ) or any(0 < defaults.key < key.open_requests + batch for key in balances.keys.values())
        if bounded:
            self._read_limits(connection, bounded)

    def too_many(self, request: CountedRequest) -> TooManyConcurrent | None:
        """Return the limit that one more request would exceed, if any."""
        if not self._checks or request.service_class != COUNTED:
            return None
        account, key, model = request.account_id, request.key_id, request.model
        limits = self._limits.get(account, _NO_LIMIT)
        limit = limits.get((0, ""), self._defaults.account)
        if limit and self._balances.accounts[account].open_requests >= limit:
            return TooManyConcurrent("account", limit)
        # An account's limit replaces both defaults, or an account with one key could not use it.
        limit = limits.get((key, ""), 0 if (0, "") in limits else self._defaults.key)
        if limit and self._balances.keys[key].open_requests >= limit:
            return TooManyConcurrent("key", limit)
        for key_id in (0, key):
            limit = limits.get((key_id, model), 0)
            if limit and self._running(account, key_id, model) >= limit:
                return TooManyConcurrent("model", limit)
        return None

    def add(self, request: CountedRequest) -> None:
        """Count a request that is accepted, for the limits of models."""
        if self._limits and request.service_class == COUNTED:
            place = request.account_id, request.key_id, request.model
            self._of_models[place] = self._of_models.get(place, 0) + 1

    def _read_limits(self, connection: Connection, bounded: Collection[int]) -> None:
        found: defaultdict[int, dict[tuple[int, str], int]] = defaultdict(dict)
        for row in _LIMITS.rows(connection, accounts=sorted(bounded)):
            found[row["account_id"]][row["key_id"], row["model"]] = row["concurrent_max"]
        if not found:
            return
        self._limits, self._checks = found, True
        by_model = sorted(id for id, own in found.items() if any(model for _, model in own))
        if by_model:
            for row in _OF_MODELS.rows(connection, accounts=by_model):
                place = row["account_id"], row["key_id"], row["model"]
                self._of_models[place] = row["requests"]

    def _running(self, account_id: int, key_id: int, model: str) -> int:
        return sum(
            count
            for (account, key, name), count in self._of_models.items()
            if account == account_id and key_id in (0, key) and name == model
        )


@dataclass(frozen=True, slots=True)
class Miscount:
    """An account or key whose row has a wrong count of open requests."""

    table: Table
    id: int
    account_id: int
    stored: int
    due: int


def miscounts(connection: Connection) -> Iterator[Miscount]:
    """Compare the counts of accounts and keys with the open holds.

    A gateway of an earlier version does not count, so the counts go wrong while one runs beside
    newer gateways.
    """
    of_accounts: defaultdict[int, int] = defaultdict(int)
    of_keys: dict[int, int] = {}
    owners: dict[int, int] = {}
    for row in connection.execute(_OPEN):
        of_accounts[row.account_id] += row.requests
        of_keys[row.key_id] = row.requests
        owners[row.key_id] = row.account_id
    counted = select(accounts.c.id, accounts.c.open_requests).where(accounts.c.open_requests != 0)
    stored = {row.id: row.open_requests for row in connection.execute(counted)}
    for id in sorted(stored.keys() | of_accounts.keys()):
        if stored.get(id, 0) != of_accounts.get(id, 0):
            yield Miscount(accounts, id, id, stored.get(id, 0), of_accounts.get(id, 0))
    own = select(keys.c.id, keys.c.account_id, keys.c.open_requests)
    stored = {}
    for row in connection.execute(own.where(keys.c.open_requests != 0)):
        stored[row.id] = row.open_requests
        owners[row.id] = row.account_id
    for id in sorted(stored.keys() | of_keys.keys()):
        if stored.get(id, 0) != of_keys.get(id, 0):
            yield Miscount(keys, id, owners[id], stored.get(id, 0), of_keys.get(id, 0))


def recount(connection: Connection, ids: Iterable[int]) -> None:
    """Set the counts of accounts and of their keys to the number of their open requests."""
    locked = list(lock_accounts(connection, ids))
    for table, owner, held_by in (
        (accounts, accounts.c.id, holds.c.account_id),
        (keys, keys.c.account_id, holds.c.key_id),
    ):
        due = select(func.count()).where(held_by == table.c.id, holds.c.service_class == COUNTED)
        connection.execute(
            update(table)
            .where(owner.in_(locked))
            .values(open_requests=due.correlate(table).scalar_subquery())
        )
