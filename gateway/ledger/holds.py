"""Holds: the quote of a request, reserved before it runs. Committed means accepted.

``hold`` decides a whole batch in one transaction. Accounts are locked in id order; every decision
is taken on rows read under that lock, and the table's CHECK would stop what this code got wrong.
Idempotent by request id, so a batch whose commit is in doubt may be written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import (
    Connection,
    RowMapping,
    bindparam,
    delete,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from gateway.accounts.budgets import Budget
from gateway.accounts.locks import lock_accounts
from gateway.ledger.bounds import Bounds, BudgetExceeded, WindowKey
from gateway.ledger.concurrency import UNBOUNDED, Defaults, OpenRequests, TooManyConcurrent
from gateway.pricing import ServiceClass
from gateway.tables.core import accounts, holds, idempotency, keys, outputs, receipts
from workers.contract.jobs import RequestId


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """What is to be accepted, and the amount that it takes."""

    request_id: RequestId
    account_id: int
    key_id: int
    model: str
    task: str
    price_id: int
    hold_nanos: int
    job: bytes
    accepted_at: datetime
    deadline_at: datetime
    idempotency_key: str | None = None
    body_sha256: bytes | None = None
    metadata: Mapping[str, str] | None = None
    webhook: str | None = None
    held_tokens: int | None = None
    """Output tokens that the amount covers, where more will be held for while it runs."""
    windows: None = None
    service_class: ServiceClass = "standard"


@dataclass(frozen=True, slots=True)
class Held:
    """Accepted; ``soft_budgets_exceeded`` are the soft budgets that it goes beyond."""

    request_id: RequestId
    soft_budgets_exceeded: tuple[Budget, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """The same order was placed before; this is the request that it made then."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class InsufficientCredit:
    available_nanos: int


@dataclass(frozen=True, slots=True)
class CreditInUse:
    """The account could cover it, were it not for its other holds."""

    available_nanos: int


@dataclass(frozen=True, slots=True)
class KeySpendLimit:
    remaining_nanos: int


@dataclass(frozen=True, slots=True)
class IdempotencyConflict:
    pass


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    pass


@dataclass(frozen=True, slots=True)
class KeyExpired:
    pass


@dataclass(frozen=True, slots=True)
class AccountSuspended:
    pass


Refusal: TypeAlias = (
    InsufficientCredit
    | CreditInUse
    | KeySpendLimit
    | IdempotencyConflict
    | KeyRevoked
    | KeyExpired
    | AccountSuspended
    | BudgetExceeded
    | TooManyConcurrent
)
HoldAnswer: TypeAlias = Held | Replayed | Refusal


@dataclass(frozen=True, slots=True)
class OpenHold:
    """An accepted request that has not ended, and the job that it is."""

    request_id: RequestId
    model: str
    job: bytes
    accepted_at: datetime


class OpenId(NamedTuple):
    """An accepted request that has not ended, and its model."""

    request_id: RequestId
    model: str


_READ_KEYS: Final = select(
    keys.c.id,
    keys.c.revoked_at,
    keys.c.expires_at,
    keys.c.spend_limit_nanos,
    keys.c.spent_nanos,
    keys.c.held_nanos,
    keys.c.open_requests,
).where(keys.c.id.in_(bindparam("ids", expanding=True)))
_KNOWN: Final = (
    select(holds.c.request_id)
    .where(holds.c.request_id.in_(bindparam("ids", expanding=True)))
    .union_all(
        select(receipts.c.request_id).where(
            receipts.c.request_id.in_(bindparam("ids", expanding=True))
        )
    )
)
_ADD_TO_ACCOUNT: Final = (
    update(accounts)
    .where(accounts.c.id == bindparam("of"))
    .values(
        held_nanos=accounts.c.held_nanos + bindparam("amount"),
        open_requests=accounts.c.open_requests + bindparam("opened"),
        version=accounts.c.version + 1,
    )
)
_ADD_TO_KEY: Final = (
    update(keys)
    .where(keys.c.id == bindparam("of"))
    .values(
        held_nanos=keys.c.held_nanos + bindparam("amount"),
        open_requests=keys.c.open_requests + bindparam("opened"),
    )
)
_INSERT: Final = insert(holds)
_NONE: Final[Mapping[int, int]] = {}


def hold(
    connection: Connection, requests: Sequence[HoldRequest], *, concurrent: Defaults = UNBOUNDED
) -> list[HoldAnswer]:
    """Decide requests in the order of their arrival and hold for those that are accepted.

    ``concurrent`` bounds the open requests of accounts and keys that have no limit of their own.
    """
    books = lock_accounts(connection, {request.account_id for request in requests})
    known_keys = read_keys(connection, {request.key_id for request in requests})
    known = set(
        connection.execute(_KNOWN, {"ids": [request.request_id for request in requests]}).scalars()
    )
    earlier = _earlier_requests(connection, requests)
    bounds = Bounds(connection, requests, [id for id, book in books.items() if book["bounded"]])
    opened = OpenRequests(connection, books, known_keys, concurrent, batch=len(requests))

    account_sums: defaultdict[int, int] = defaultdict(int)
    key_sums: defaultdict[int, int] = defaultdict(int)
    accepted: list[tuple[HoldRequest, list[WindowKey]]] = []
    answers: list[HoldAnswer] = []
    for request in requests:
        answer = _decide(
            request,
            account=books[request.account_id],
            key=known_keys[request.key_id],
            account_sum=account_sums[request.account_id],
            key_sum=key_sums[request.key_id],
            known=known,
            earlier=earlier,
            bounds=bounds,
            opened=opened,
        )
        if isinstance(answer, Held) and request.request_id not in known:
            known.add(request.request_id)
            account_sums[request.account_id] += request.hold_nanos
            key_sums[request.key_id] += request.hold_nanos
            windows, exceeded = bounds.add(request)
            opened.add(request)
            answer = Held(request.request_id, exceeded)
            accepted.append((request, windows))
            if request.idempotency_key is not None:
                earlier[request.account_id, request.idempotency_key] = (
                    request.request_id,
                    request.body_sha256,
                )
        answers.append(answer)
    if accepted:
        add_held(
            connection,
            account_sums,
            key_sums,
            accounts_opened=opened.opened_by_account,
            keys_opened=opened.opened_by_key,
        )
        _write(connection, accepted)
        bounds.write(connection)
    return answers


def _decide(
    request: HoldRequest,
    *,
    account: RowMapping,
    key: RowMapping,
    account_sum: int,
    key_sum: int,
    known: set[str],
    earlier: Mapping[tuple[int, str], tuple[str, bytes | None]],
    bounds: Bounds,
    opened: OpenRequests,
) -> HoldAnswer:
    if request.request_id in known:
        return Held(request.request_id)
    if key["revoked_at"] is not None:
        return KeyRevoked()
    if key["expires_at"] is not None and key["expires_at"] <= request.accepted_at:
        return KeyExpired()
    if account["status"] != "active":
        return AccountSuspended()
    if request.idempotency_key is not None:
        known_request = earlier.get((request.account_id, request.idempotency_key))
        if known_request is not None:
            same = known_request[1] == request.body_sha256
            return Replayed(RequestId(known_request[0])) if same else IdempotencyConflict()
    short = shortage(request.hold_nanos, account, key, account_sum=account_sum, key_sum=key_sum)
    if short is not None:
        return short
    return opened.too_many(request) or bounds.exceeded(request) or Held(request.request_id)


def shortage(
    amount_nanos: int, account: RowMapping, key: RowMapping, *, account_sum: int, key_sum: int
) -> InsufficientCredit | CreditInUse | KeySpendLimit | None:
    """Say why a locked account or its key cannot cover an amount, on top of sums just decided."""
    total = account["posted_nanos"] + account["credit_limit_nanos"]
    available = total - account["held_nanos"] - account_sum
    if amount_nanos > total:
        return InsufficientCredit(available)
    if amount_nanos > available:
        return CreditInUse(available)
    if key["spend_limit_nanos"] is not None:
        used = key["spent_nanos"] + key["held_nanos"] + key_sum
        remaining = key["spend_limit_nanos"] - used
        if amount_nanos > remaining:
            return KeySpendLimit(remaining)
    return None


def read_keys(connection: Connection, ids: Iterable[int]) -> dict[int, RowMapping]:
    """Read what holds depend on of keys whose accounts are locked."""
    rows = connection.execute(_READ_KEYS, {"ids": sorted(ids)}).mappings()
    return {row["id"]: row for row in rows}


def add_held(
    connection: Connection,
    account_sums: Mapping[int, int],
    key_sums: Mapping[int, int],
    *,
    accounts_opened: Mapping[int, int] = _NONE,
    keys_opened: Mapping[int, int] = _NONE,
) -> None:
    """Hold more of accounts and keys, and count the requests that this opens."""
    for statement, sums, opened in (
        (_ADD_TO_ACCOUNT, account_sums, accounts_opened),
        (_ADD_TO_KEY, key_sums, keys_opened),
    ):
        rows = [
            {"of": id, "amount": amount, "opened": opened.get(id, 0)}
            for id, amount in sorted(sums.items())
            if amount or opened.get(id, 0)
        ]
        if rows:
            connection.execute(statement, rows)


def _write(connection: Connection, accepted: Sequence[tuple[HoldRequest, list[WindowKey]]]) -> None:
    connection.execute(
        _INSERT,
        [
            {
                "request_id": request.request_id,
                "account_id": request.account_id,
                "key_id": request.key_id,
                "model": request.model,
                "task": request.task,
                "price_id": request.price_id,
                "hold_nanos": request.hold_nanos,
                "job": request.job,
                "metadata": request.metadata,
                "windows": windows or None,
                "held_tokens": request.held_tokens,
                "webhook": request.webhook,
                "service_class": request.service_class,
                "accepted_at": request.accepted_at,
                "deadline_at": request.deadline_at,
            }
            for request, windows in accepted
        ],
    )
    named = [request for request, _ in accepted if request.idempotency_key is not None]
    if named:
        connection.execute(
            insert(idempotency),
            [
                {
                    "account_id": request.account_id,
                    "key": request.idempotency_key,
                    "request_id": request.request_id,
                    "body_sha256": request.body_sha256,
                    "created_at": request.accepted_at,
                }
                for request in named
            ],
        )


def _earlier_requests(
    connection: Connection, requests: Sequence[HoldRequest]
) -> dict[tuple[int, str], tuple[str, bytes | None]]:
    """Orders with a name of their own that were placed before: (account, key) → request, body."""
    names = [
        (request.account_id, request.idempotency_key)
        for request in requests
        if request.idempotency_key is not None
    ]
    if not names:
        return {}
    rows = connection.execute(
        select(idempotency).where(tuple_(idempotency.c.account_id, idempotency.c.key).in_(names))
    )
    return {(row.account_id, row.key): (row.request_id, row.body_sha256) for row in rows}


def read_open_ids(connection: Connection, *, after: str, until: str, limit: int) -> list[OpenId]:
    """Read which requests are open, in the order of their ids, between two ids.

    Nothing else is read: the jobs of all open requests are a hundred times as large.
    """
    query = (
        select(holds.c.request_id, holds.c.model)
        .where(holds.c.request_id > after, holds.c.request_id < until)
        .order_by(holds.c.request_id)
        .limit(limit)
    )
    return [OpenId(RequestId(row[0]), row[1]) for row in connection.execute(query).all()]


def read_jobs(connection: Connection, ids: Sequence[str]) -> list[OpenHold]:
    """Read the jobs of those of these requests that are open."""
    query = select(holds.c.request_id, holds.c.model, holds.c.job, holds.c.accepted_at).where(
        holds.c.request_id.in_(ids)
    )
    return [
        OpenHold(RequestId(row.request_id), row.model, row.job, row.accepted_at)
        for row in connection.execute(query)
    ]


def overdue_holds(
    connection: Connection,
    *,
    deadline_before: datetime,
    after: tuple[datetime, str] | None = None,
    limit: int,
) -> list[tuple[datetime, RequestId]]:
    """Read which open requests are past their deadline, the oldest first, with their deadlines;
    ``after`` is the last one of the page before."""
    order = (holds.c.deadline_at, holds.c.request_id)
    query = select(*order).where(holds.c.deadline_at < deadline_before)
    if after is not None:
        deadline_at, request_id = after
        query = query.where(
            holds.c.deadline_at >= deadline_at,
            or_(holds.c.deadline_at > deadline_at, holds.c.request_id > request_id),
        )
    rows = connection.execute(query.order_by(*order).limit(limit)).all()
    return [(row[0], RequestId(row[1])) for row in rows]


def delete_output(connection: Connection, account_id: int, request_id: str) -> None:
    """Delete what a request of an account gave; its receipt stays."""
    mine = select(receipts.c.request_id).where(
        receipts.c.request_id == request_id, receipts.c.account_id == account_id
    )
    connection.execute(delete(outputs).where(outputs.c.request_id.in_(mine)))


def delete_expired_outputs(connection: Connection, now: datetime, *, limit: int) -> int:
    """Delete some of the outputs that are past their time; return how many."""
    over = select(outputs.c.request_id).where(outputs.c.expires_at < now).limit(limit)
    return connection.execute(delete(outputs).where(outputs.c.request_id.in_(over))).rowcount


def delete_idempotency_keys(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some of the idempotency keys older than a moment; return how many."""
    id = (idempotency.c.account_id, idempotency.c.key)
    old = select(*id).where(idempotency.c.created_at < before).limit(limit)
    return connection.execute(delete(idempotency).where(tuple_(*id).in_(old))).rowcount
