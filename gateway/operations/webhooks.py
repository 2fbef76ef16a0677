"""Webhook deliveries: list, send again. The secret that signs them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict
from urllib.parse import urlsplit

from sqlalchemy import Connection

from gateway.audit_log import AuditFilter, Author, list_events, record
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.ids import is_request_id
from gateway.webhooks.deliveries import Attempt, Delivery, Status, list_deliveries, send_again
from gateway.webhooks.sender import signing_secret


class AttemptView(TypedDict):
    """One attempt; ``code`` is the receiver's HTTP status, ``answer`` begins its response."""

    number: int
    started_at: str
    duration_ms: int
    code: int | None
    error: str | None
    answer: str | None


class DeliveryView(TypedDict):
    """A webhook delivery with its attempts; administrators also get ``account_id``."""

    object: Literal["webhook.delivery"]
    id: str
    request_id: str
    url: str
    status: str
    queued_at: str
    next_attempt_at: str | None
    ended_at: str | None
    attempts: list[AttemptView]
    account_id: NotRequired[int]


def deliveries(
    connection: Connection,
    account_id: int | None,
    *,
    limit: int,
    status: Status | None,
    before: str | None,
) -> list[DeliveryView]:
    """List deliveries, newest request first. Of all accounts, each with its ``account_id``."""
    found = list_deliveries(
        connection, account_id=account_id, limit=limit, status=status, before=before
    )
    views = [delivery_view(each) for each in found]
    if account_id is None:
        for each, view in zip(found, views, strict=True):
            view["account_id"] = each.account_id
    return views


def resend(
    connection: Connection, author: Author, request_id: str, *, account_id: int | None
) -> DeliveryView:
    """Start a new series of attempts, whatever the result of the last one.

    ``account_id`` is that of the caller, or None for an operator, whose act is recorded. Raise
    ``NotFound``.
    """
    found = None
    if is_request_id(request_id):
        now = datetime.now(UTC)
        found = send_again(connection, request_id, account_id=account_id, now=now)
    if found is None:
        raise NotFound(
            "delivery_not_found",
            f"No webhook delivery for {request_id!r}: the request has not ended, has no "
            "webhook, or its delivery was deleted.",
            param="request_id",
        )
    if account_id is None:
        record(
            connection,
            author,
            "webhook.resend",
            f"request {request_id}",
            account_id=found.account_id,
            # Its path and query can be a secret.
            after={"host": urlsplit(found.url).hostname},
        )
    return delivery_view(found)


def reveal_secret(
    connection: Connection, author: Author, account_id: int, *, pepper: bytes
) -> str | None:
    """Return the secret that signs an account's webhooks, and record who read it.

    None if this call of the author has read it before: a page that is reloaded shows it no more.
    """
    wanted = AuditFilter(call_id=author.call_id, account_id=account_id)
    if list_events(connection, wanted, limit=1):
        return None
    record(connection, author, "webhook.reveal", f"account {account_id}", account_id=account_id)
    return signing_secret(pepper, account_id)


def delivery_view(found: Delivery) -> DeliveryView:
    """Return the view of a delivery. An attempt that a stopping gateway interrupted is missing."""
    return {
        "object": "webhook.delivery",
        "id": found.request_id,
        "request_id": found.request_id,
        "url": found.url,
        "status": found.status,
        "queued_at": timestamp(found.queued_at),
        "next_attempt_at": timestamp(found.due_at) if found.due_at else None,
        "ended_at": timestamp(found.ended_at) if found.ended_at else None,
        "attempts": attempt_views(found.attempts),
    }


def attempt_views(attempts: Sequence[Attempt]) -> list[AttemptView]:
    return [
        {
            "number": attempt.number,
            "started_at": timestamp(attempt.started_at),
            "duration_ms": attempt.duration_ms,
            "code": attempt.code,
            "error": attempt.error,
            "answer": attempt.answer,
        }
        for attempt in attempts
    ]
