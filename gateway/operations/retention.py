"""Retention: how far clearing is behind; erasing what is personal of an account, request or tag."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TypedDict

from pydantic import ConfigDict
from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest
from gateway.operations.accounts import find_owner
from gateway.operations.bodies import Body, Id, Name
from gateway.retention.clearing import Retention, State
from gateway.retention.erasure import Eraser, Target, begin_erasure, check_target
from gateway.sql.database import Database


class RetentionView(TypedDict):
    """State of a kind. ``due_at``: since or from when its oldest row is due; ``due``: rows that
    would be cleared now, of which at most 10,000 are counted; null if they are not counted."""

    object: Literal["retention"]
    kind: str
    setting: str | None
    due_at: str | None
    lag_s: float
    due: int | None
    cleared: int
    cleared_at: str | None


def list_states(connection: Connection, retention: Retention) -> list[RetentionView]:
    """Return what is kept, what is due and what was cleared, by kind."""
    now = datetime.now(UTC)
    due = retention.count_due(connection, now)
    return [_view(state, now, due.get(state.kind.name)) for state in retention.measure(connection)]


def record_run(connection: Connection, author: Author, cleared: Mapping[str, int]) -> None:
    """Record that an operator cleared what was due."""
    record(connection, author, "retention.run", "retention", after=dict(cleared))


class ErasureBody(Body):
    """What to erase: an account, a request, or all requests with a tag (of an account, if both
    are named). ``cursor`` continues an erasure."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"tag": "customer=ann", "account": "acme"}]},
    )

    account: Name | Id | None = None
    request: Name | None = None
    tag: Name | None = None
    dry_run: bool = False
    cursor: Name | None = None


class ErasureView(TypedDict):
    """A step of an erasure: rows by kind; with a cursor, more steps are needed."""

    object: Literal["erasure"]
    subject: str
    dry_run: bool
    erased: dict[str, int]
    cursor: str | None


async def erase(
    database: Database, eraser: Eraser, author: Author, body: ErasureBody
) -> ErasureView:
    """Erase a bounded part of a target; the first one is recorded."""
    target = await database.read(lambda connection: _find_target(connection, body))

    def begin(connection: Connection) -> None:
        check_target(connection, target)
        begin_erasure(connection, target)
        record(
            connection,
            author,
            "erasure.run",
            target.subject,
            account_id=target.account_id,
            after={"tag": target.tag[0]} if target.tag else None,
        )

    if body.cursor is None and not body.dry_run:
        await database.write(begin)
    step = await eraser.step(target, body.cursor, dry=body.dry_run)
    return {
        "object": "erasure",
        "subject": target.subject,
        "dry_run": body.dry_run,
        "erased": {kind: rows for kind, rows in step.counts.items() if rows},
        "cursor": step.cursor,
    }


def _find_target(connection: Connection, body: ErasureBody) -> Target:
    """Raise ``NotFound`` or ``InvalidRequest``."""
    account_id = None if body.account is None else find_owner(connection, body.account).id
    if body.request is not None:
        if body.tag is None and account_id is None:
            return Target(request_id=body.request)
    elif body.tag is not None:
        key, is_tag, value = body.tag.partition("=")
        if key and is_tag and value:
            return Target(account_id, tag=(key, value))
        raise InvalidRequest(
            "invalid_value", f"{body.tag!r} is not a tag; use KEY=VALUE.", param="tag"
        )
    elif account_id is not None:
        return Target(account_id)
    raise InvalidRequest(
        "invalid_value", "Name an account, or a request, or a tag.", param="account"
    )


def _view(state: State, now: datetime, due: int | None) -> RetentionView:
    return {
        "object": "retention",
        "kind": state.kind.name,
        "setting": state.kind.setting or None,
        "due_at": timestamp(state.due_at) if state.due_at else None,
        "lag_s": round(state.lag(now).total_seconds(), 3),
        "due": due,
        "cleared": state.cleared,
        "cleared_at": timestamp(state.cleared_at) if state.cleared_at else None,
    }
