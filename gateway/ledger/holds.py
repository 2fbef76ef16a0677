"""Holds: the quote of a request, reserved before it runs. A committed hold means accepted.

``hold`` decides a batch of requests in one transaction. Accounts are locked in id order, every
decision is based on rows read under that lock, and a CHECK of the table guards against mistakes in
this code. Idempotent by request id, so a batch whose commit is in doubt can be written again.
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
    idempotency_key: str | None = None
    body_sha256: bytes | None = None
    metadata: Mapping[str, str] | None = None
    webhook: str | None = None
    held_tokens: int | None = None
    """Output tokens that the amount covers, if the hold will be extended while the request runs."""
    windows: None = None
    service_class: ServiceClass = "standard"


@dataclass(frozen=True, slots=True)
class Held:
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
    """Id and model of an accepted request that has not ended."""

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
    """Decide requests in order of arrival, and insert holds for those that are accepted.

    ``concurrent`` limits the open requests of accounts and keys without a configured limit.
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
    """Return why a locked account or its key cannot cover an amount, or None if it can.

    ``account_sum`` and ``key_sum`` were held earlier in the same batch.
    """
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
    """Read keys whose accounts are locked: the columns that holds depend on."""
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
    """Increase the held amounts and the open requests of accounts and keys."""
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
    """Find earlier requests by idempotency key: (account, key) → (request, digest of the body)."""
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
    """Read open requests between two ids, in order of id.

    Their jobs are left out: they are a hundred times as large.
    """
    query = (
        select(holds.c.request_id, holds.c.model)
        .where(holds.c.request_id > after, holds.c.request_id < until)
        .order_by(holds.c.request_id)
        .limit(limit)
    )
    return [OpenId(RequestId(row[0]), row[1]) for row in connection.execute(query).all()]


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
    over = select(outputs.c.request_id).where(outputs.c.expires_at < now).limit(limit)
    return connection.execute(delete(outputs).where(outputs.c.request_id.in_(over))).rowcount


def delete_idempotency_keys(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some of the idempotency keys older than a moment; return their number."""
    id = (idempotency.c.account_id, idempotency.c.key)
    old = select(*id).where(idempotency.c.created_at < before).limit(limit)
    return connection.execute(delete(idempotency).where(tuple_(*id).in_(old))).rowcount
