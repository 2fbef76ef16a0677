"""The audit log: list, export."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

import msgspec
from sqlalchemy import Connection

from gateway.accounts.roles import Role, area_of, check_role, may
from gateway.audit_log import (
    ACTS,
    ID_PREFIX,
    Act,
    AuditEvent,
    AuditFilter,
    Origin,
    list_events,
)
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest
from gateway.ids import is_id
from gateway.operations.accounts import owner_id

Format: TypeAlias = Literal["jsonl", "csv"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
PAGE: Final = 1000
"""Number of events that an export reads at a time."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Starts of cells that spreadsheets compute."""


class AuditEventView(TypedDict):
    """A recorded act. ``before`` and ``after`` have the fields that it changed."""

    object: Literal["audit.event"]
    id: str
    at: str
    act: str
    subject: str
    account_id: int | None
    origin: Origin
    actor: str
    key_id: int | None
    reason: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    call_id: str


def read_filter(
    connection: Connection,
    *,
    account: str | None,
    actor: str | None,
    act: Act | None,
    subject: str | None,
    origin: Origin | None,
    call_id: str | None,
    starts_at: datetime | None,
    ends_at: datetime | None,
    role: Role = "operator",
) -> AuditFilter:
    """Build a filter of acts in the areas that a role may read.

    Raise ``NotFound`` if the account does not exist, ``Forbidden`` if the role may not read the
    acts asked for.
    """
    if act is not None:
        check_role(role, area_of(act), write=False)
    readable = readable_acts(role)
    return AuditFilter(
        owner_id(connection, account),
        actor,
        act,
        subject,
        origin,
        call_id,
        starts_at,
        ends_at,
        None if len(readable) == len(ACTS) else readable,
    )


def readable_acts(role: Role) -> list[Act]:
    """List the acts in the areas that a role may read."""
    return [each for each in ACTS if may(role, area_of(each), write=False)]


def list_page(
    connection: Connection, wanted: AuditFilter, *, limit: int, cursor: str | None
) -> tuple[list[AuditEventView], str | None]:
    """List events, newest first, and return the cursor of the next page."""
    if cursor is not None and not is_id(ID_PREFIX, cursor):
        raise InvalidRequest(
            "invalid_value", f"{cursor!r} is not the id of an event.", param="cursor"
        )
    found = list_events(connection, wanted, limit=limit + 1, cursor=cursor)
    more = found[limit - 1].id if len(found) > limit else None
    return [event_view(each) for each in found[:limit]], more


def export_page(
    connection: Connection, wanted: AuditFilter, *, format: Format, cursor: str | None
) -> tuple[bytes, str | None]:
    """Encode a part of an export, oldest first, and return the cursor of the next part.

    A CSV file starts with the names of its columns. Its cells are quoted with an apostrophe if a
    spreadsheet would compute them.
    """
    found = list_events(connection, wanted, limit=PAGE, cursor=cursor, oldest_first=True)
    views = [event_view(each) for each in found]
    more = found[-1].id if len(found) == PAGE else None
    if format == "jsonl":
        return b"".join(msgspec.json.encode(view) + b"\n" for view in views), more
    return _csv(views, header=cursor is None), more


def event_view(event: AuditEvent) -> AuditEventView:
    return {
        "object": "audit.event",
        "id": event.id,
        "at": timestamp(event.at),
        "act": event.act,
        "subject": event.subject,
        "account_id": event.account_id,
        "origin": event.origin,
        "actor": event.actor,
        "key_id": event.key_id,
        "reason": event.reason,
        "before": _copy(event.before),
        "after": _copy(event.after),
        "call_id": event.call_id,
    }


def _copy(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if fields is None else dict(fields)


def _csv(views: Sequence[AuditEventView], *, header: bool) -> bytes:
    columns = [name for name in AuditEventView.__annotations__ if name != "object"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    for view in views:
        writer.writerow(_cell(dict(view)[name]) for name in columns)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"'{text}" if text.startswith(_FORMULA) else text
