"""Limits on concurrent requests (queued or running) of accounts and keys, configured or default.

The rows of accounts and keys count their open requests, updated by the statements that update the
held amounts, so these limits cost no query. Requests per model are counted only for accounts that
have a limit for a model. Batch lines are not counted: batches have a separate limit, so that they
cannot use up the concurrency of interactive requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy import Connection, RowMapping, Table, bindparam, func, select, update

from gateway.accounts.locks import lock_accounts
from gateway.pricing import ServiceClass
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


_LIMITS: Final = select(
    rate_limits.c.account_id,
    rate_limits.c.key_id,
    rate_limits.c.model,
    rate_limits.c.concurrent_max,
).where(
    rate_limits.c.account_id.in_(bindparam("accounts", expanding=True)),
    rate_limits.c.concurrent_max.is_not(None),
)
_OF_MODELS: Final = (
    select(holds.c.account_id, holds.c.key_id, holds.c.model, func.count().label("requests"))
    .where(
        holds.c.account_id.in_(bindparam("accounts", expanding=True)),
        holds.c.service_class == COUNTED,
    )
    .group_by(holds.c.account_id, holds.c.key_id, holds.c.model)
)
_OPEN: Final = (
    select(holds.c.account_id, holds.c.key_id, func.count().label("requests"))
    .where(holds.c.service_class == COUNTED)
    .group_by(holds.c.account_id, holds.c.key_id)
)
_NO_LIMIT: Final[Mapping[tuple[int, str], int]] = {}
_NO_LIMITS: Final[Mapping[int, Mapping[tuple[int, str], int]]] = {}


class OpenRequests:
    """Open requests of locked accounts and their keys, updated while a batch is decided."""

    def __init__(
        self,
        connection: Connection,
        accounts: Mapping[int, RowMapping],
        keys: Mapping[int, RowMapping],
        defaults: Defaults,
        *,
        batch: int,
    ) -> None:
        """Read the limits of accounts that have any; other accounts cost no query.

        ``batch`` is the number of requests to decide. If the limits leave room for all of them,
        none is checked.
        """
        self._accounts = accounts
        self._keys = keys
        self._defaults = defaults
        self._limits: Mapping[int, Mapping[tuple[int, str], int]] = _NO_LIMITS
        self._of_models: dict[tuple[int, int, str], int] = {}
        self.opened_by_account: dict[int, int] = {}
        """Number of requests that this batch opens, by account."""
        self.opened_by_key: dict[int, int] = {}
        """Number of requests that this batch opens, by key."""
        self._checks = False
        bounded = []
        for id, account in accounts.items():
            if account["bounded"]:
                bounded.append(id)
            if 0 < defaults.account < account["open_requests"] + batch:
                self._checks = True
        for key in keys.values():
            if 0 < defaults.key < key["open_requests"] + batch:
                self._checks = True
        if bounded:
            self._read_limits(connection, bounded)

    def too_many(self, request: CountedRequest) -> TooManyConcurrent | None:
        """Return the limit that one more request would exceed, if any."""
        if not self._checks or request.service_class != COUNTED:
            return None
        account, key, model = request.account_id, request.key_id, request.model
        limits = self._limits.get(account, _NO_LIMIT)
        running = self._accounts[account]["open_requests"] + self.opened_by_account.get(account, 0)
        limit = limits.get((0, ""), self._defaults.account)
        if limit and running >= limit:
            return TooManyConcurrent("account", limit)
        running = self._keys[key]["open_requests"] + self.opened_by_key.get(key, 0)
        # An account's limit replaces both defaults, or an account with one key could not use it.
        limit = limits.get((key, ""), 0 if (0, "") in limits else self._defaults.key)
        if limit and running >= limit:
            return TooManyConcurrent("key", limit)
        for key_id in (0, key):
            limit = limits.get((key_id, model), 0)
            if limit and self._running(account, key_id, model) >= limit:
                return TooManyConcurrent("model", limit)
        return None

    def add(self, request: CountedRequest) -> None:
        """Count a request that is accepted."""
        if request.service_class == COUNTED:
            account, key = request.account_id, request.key_id
            self.opened_by_account[account] = self.opened_by_account.get(account, 0) + 1
            self.opened_by_key[key] = self.opened_by_key.get(key, 0) + 1
            if self._limits:
                place = account, key, request.model
                self._of_models[place] = self._of_models.get(place, 0) + 1

    def _read_limits(self, connection: Connection, bounded: Sequence[int]) -> None:
        found: defaultdict[int, dict[tuple[int, str], int]] = defaultdict(dict)
        for row in connection.execute(_LIMITS, {"accounts": sorted(bounded)}):
            found[row.account_id][row.key_id, row.model] = row.concurrent_max
        if not found:
            return
        self._limits, self._checks = found, True
        by_model = sorted(id for id, own in found.items() if any(model for _, model in own))
        if by_model:
            for row in connection.execute(_OF_MODELS, {"accounts": by_model}):
                self._of_models[row.account_id, row.key_id, row.model] = row.requests

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
