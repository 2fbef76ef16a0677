"""Holds: the quote of a request, reserved before it runs. A committed hold means accepted.

``hold`` decides a batch of requests in one transaction. Accounts are locked in id order, every
decision is based on rows read under that lock, and a CHECK of the table guards against mistakes in
this code. Idempotent by request id, so a batch whose commit is in doubt can be written again once
its first transaction has ended; at the same time, the primary key refuses one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, tuple_, union_all

from gateway.accounts.budgets import Budget
from gateway.ledger.balances import AccountBalance, Balances, KeyBalance, lock_balances
from gateway.ledger.bounds import Bounds, BudgetExceeded, WindowKey
from gateway.ledger.concurrency import (
    COUNTED,
    UNBOUNDED,
    Defaults,
    OpenRequests,
    TooManyConcurrent,
)
from gateway.pricing import ServiceClass
from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import holds, idempotency, outputs, receipts
from workers.contract.jobs import RequestId


class HoldRequest(msgspec.Struct, frozen=True):
    """A request to be accepted, and the amount to hold."""

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
    served_by: str | None = None
    """The model that runs it, if not the one that was ordered."""
    idempotency_key: str | None = None
    body_sha256: bytes | None = None
    metadata: Mapping[str, str] | None = None
    webhook: str | None = None
    held_tokens: int | None = None
    """Output tokens that the amount covers, if the hold will be extended while the request runs."""
    windows: None = None
    service_class: ServiceClass = "standard"
    durable: bool = True
    """Whether the hold must survive a power failure by itself; if not, its settlement does."""


class Held(msgspec.Struct, frozen=True):
    """The request is accepted; it may exceed soft budgets."""

    request_id: RequestId
    soft_budgets_exceeded: tuple[Budget, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """The idempotency key was used before with the same body, for this request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class InsufficientCredit:
    available_nanos: int


@dataclass(frozen=True, slots=True)
class CreditInUse:
    """The account's credit would suffice, but other holds use it."""

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
    """An accepted request that has not ended, with its job."""

    request_id: RequestId
    model: str
    job: bytes
    accepted_at: datetime


class OpenId(NamedTuple):
    """Id of an accepted request that has not ended, and the model in whose queue it is."""

    request_id: RequestId
    queue: str


class OwnedId(NamedTuple):
    """Id of an open request, the model in whose queue it is, and its account."""

    request_id: RequestId
    queue: str
    account_id: int


_KNOWN: Final = CompiledStatement(
    union_all(
        select(holds.c.request_id).where(any_of(holds.c.request_id, "ids")),
        select(receipts.c.request_id).where(any_of(receipts.c.request_id, "ids")),
    )
)
_EARLIER: Final = CompiledStatement(
    select(
        idempotency.c.account_id,
        idempotency.c.key,
        idempotency.c.request_id,
        idempotency.c.body_sha256,
    ).where(
        idempotency.c.account_id == bindparam("account"), idempotency.c.key == bindparam("name")
    )
)
_INSERT: Final = CompiledStatement(
    insert(holds),
    columns=[column.name for column in holds.columns if column is not holds.c.cut],
)
_INSERT_NAME: Final = CompiledStatement(
    insert(idempotency), columns=[column.name for column in idempotency.columns]
)


def hold(
    connection: Connection, requests: Sequence[HoldRequest], *, concurrent: Defaults = UNBOUNDED
) -> list[HoldAnswer]:
    """Decide requests in order of arrival, and insert holds for those that are accepted.

    ``concurrent`` limits the open requests of accounts and keys without a configured limit.
    """
    balances = lock_balances(
        connection,
        new=[request.request_id for request in requests],
        keys={request.key_id for request in requests},
    )
    answers = accept(connection, balances, requests, concurrent=concurrent)
    balances.write(connection)
    return answers


def accept(
    connection: Connection,
    balances: Balances,
    requests: Sequence[HoldRequest],
    *,
    concurrent: Defaults,
) -> list[HoldAnswer]:
    """Do what ``hold`` does, with locked balances that the caller writes."""
    known = _known(connection, requests) if balances.repeated else set()
    earlier = _earlier_requests(connection, requests)
    bounded = {
        request.account_id for request in requests if balances.accounts[request.account_id].bounded
    }
    bounds = Bounds(connection, requests, bounded, balances.organisations.current)
    opened = OpenRequests(connection, balances, concurrent, bounded, batch=len(requests))

    accepted: list[tuple[HoldRequest, list[WindowKey]]] = []
    answers: list[HoldAnswer] = []
    for request in requests:
        answer = _decide(
            request,
            account=balances.accounts[request.account_id],
            key=balances.keys[request.key_id],
            known=known,
            earlier=earlier,
            bounds=bounds,
            opened=opened,
        )
        if isinstance(answer, Held) and request.request_id not in known:
            known.add(request.request_id)
            windows, exceeded = bounds.add(request)
            opened.add(request)
            balances.change(
                request.account_id,
                request.key_id,
                held=request.hold_nanos,
                opened=int(request.service_class == COUNTED),
            )
            answer = Held(request.request_id, exceeded)
            accepted.append((request, windows))
            if request.idempotency_key is not None:
                earlier[request.account_id, request.idempotency_key] = (
                    request.request_id,
                    request.body_sha256,
                )
        answers.append(answer)
    if accepted:
        _write(connection, accepted)
        bounds.write(connection)
    return answers


def _decide(
    request: HoldRequest,
    *,
    account: AccountBalance,
    key: KeyBalance,
    known: set[str],
    earlier: Mapping[tuple[int, str], tuple[str, bytes | None]],
    bounds: Bounds,
    opened: OpenRequests,
) -> HoldAnswer:
    if request.request_id in known:
        return Held(request.request_id)
    if key.revoked_at is not None:
        return KeyRevoked()
    if key.expires_at is not None and key.expires_at <= request.accepted_at:
        return KeyExpired()
    if account.status != "active":
        return AccountSuspended()
    if request.idempotency_key is not None:
        known_request = earlier.get((request.account_id, request.idempotency_key))
        if known_request is not None:
            same = known_request[1] == request.body_sha256
            return Replayed(RequestId(known_request[0])) if same else IdempotencyConflict()
    short = shortage(request.hold_nanos, account, key)
    if short is not None:
        return short
    return opened.too_many(request) or bounds.exceeded(request) or Held(request.request_id)


def shortage(
    amount_nanos: int, account: AccountBalance, key: KeyBalance
) -> InsufficientCredit | CreditInUse | KeySpendLimit | None:
    """Return why a locked account or its key cannot cover an amount, or None if it can."""
    total = account.posted_nanos + account.credit_limit_nanos
    available = total - account.held_nanos
    if amount_nanos > total:
        return InsufficientCredit(available)
    if amount_nanos > available:
        return CreditInUse(available)
    if key.spend_limit_nanos is not None:
        remaining = key.spend_limit_nanos - key.spent_nanos - key.held_nanos
        if amount_nanos > remaining:
            return KeySpendLimit(remaining)
    return None


def _write(connection: Connection, accepted: Sequence[tuple[HoldRequest, list[WindowKey]]]) -> None:
    _INSERT.run(
        connection,
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
                "served_by": request.served_by,
                "held_tokens": request.held_tokens,
                "webhook": request.webhook,
                "service_class": request.service_class,
                "accepted_at": request.accepted_at,
                "deadline_at": request.deadline_at,
            }
            for request, windows in accepted
        ],
    )
    _INSERT_NAME.run(
        connection,
        [
            {
                "account_id": request.account_id,
                "key": request.idempotency_key,
                "request_id": request.request_id,
                "body_sha256": request.body_sha256,
                "created_at": request.accepted_at,
            }
            for request, _ in accepted
            if request.idempotency_key is not None
        ],
    )


def _known(connection: Connection, requests: Sequence[HoldRequest]) -> set[str]:
    """Find the requests that were accepted before, open or closed."""
    rows = _KNOWN.rows(connection, ids=[request.request_id for request in requests])
    return {row["request_id"] for row in rows}


def _earlier_requests(
    connection: Connection, requests: Sequence[HoldRequest]
) -> dict[tuple[int, str], tuple[str, bytes | None]]:
    """Find earlier requests by idempotency key: (account, key) → (request, digest of the body)."""
    names = [
        {"account": request.account_id, "name": request.idempotency_key}
        for request in requests
        if request.idempotency_key is not None
    ]
    return {
        (row["account_id"], row["key"]): (row["request_id"], row["body_sha256"])
        for row in _EARLIER.first_each(connection, names)
        if row is not None
    }


def read_open_ids(connection: Connection, *, after: str, until: str, limit: int) -> list[OpenId]:
    """Read open requests between two ids, in order of id.

    Their jobs are left out: they are a hundred times as large.
    """
    query = (
        select(holds.c.request_id, func.coalesce(holds.c.served_by, holds.c.model))
        .where(holds.c.request_id > after, holds.c.request_id < until)
        .order_by(holds.c.request_id)
        .limit(limit)
    )
    return [OpenId(RequestId(row[0]), row[1]) for row in connection.execute(query).all()]


def find_open(connection: Connection, request_id: str) -> OwnedId | None:
    """Find an open request; None if there is none of this id."""
    queue = func.coalesce(holds.c.served_by, holds.c.model)
    query = select(holds.c.request_id, queue, holds.c.account_id)
    row = connection.execute(query.where(holds.c.request_id == request_id)).one_or_none()
    return None if row is None else OwnedId(RequestId(row[0]), row[1], row[2])


def read_jobs(connection: Connection, ids: Sequence[str]) -> list[OpenHold]:
    """Read the jobs of these requests; those that have ended are left out."""
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
    """Read open requests past their deadline, oldest deadline first.

    ``after`` is the last entry of the previous page.
    """
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
    """Delete the output of an account's request; the receipt stays."""
    mine = select(receipts.c.request_id).where(
        receipts.c.request_id == request_id, receipts.c.account_id == account_id
    )
    connection.execute(delete(outputs).where(outputs.c.request_id.in_(mine)))


def delete_expired_outputs(connection: Connection, now: datetime, *, limit: int) -> int:
    """Delete some of the outputs whose retention has ended; return their number."""
    expiry = outputs.c.expires_at
    over = select(outputs.c.request_id).where(expiry < now).order_by(expiry).limit(limit)
    return connection.execute(delete(outputs).where(outputs.c.request_id.in_(over))).rowcount


def delete_idempotency_keys(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some of the idempotency keys older than a moment; return their number."""
    id = (idempotency.c.account_id, idempotency.c.key)
    made = idempotency.c.created_at
    old = select(*id).where(made < before).order_by(made).limit(limit)
    return connection.execute(delete(idempotency).where(tuple_(*id).in_(old))).rowcount
