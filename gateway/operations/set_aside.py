"""Rows that were set aside: list, retry, release."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec
from sqlalchemy import Connection

from gateway.aside import Kind, Note, delete_note, find_note, list_notes, read_content
from gateway.audit_log import Act, Author, record
from gateway.batches import store as batches
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import settle
from gateway.requests.lookup import Lookup
from gateway.requests.settle import RELEASED, released
from workers.contract.jobs import RequestId

Action: TypeAlias = Literal["retry", "release"]


class SetAsideView(TypedDict):
    """A stored row that could not be processed."""

    object: Literal["set_aside"]
    kind: Kind
    name: str
    reason: str
    times: int
    first_at: str
    last_at: str


class SetAsideDetailView(SetAsideView):
    """A row that was set aside. ``content``: of a result, what the upstream returned."""

    content: Any
    content_hidden: bool
    """Whether there is content that the caller may not see."""


def list_all(connection: Connection, *, limit: int) -> list[SetAsideView]:
    """List what is set aside, newest first."""
    return [_view(note) for note in list_notes(connection, limit=limit)]


def show(connection: Connection, kind: Kind, name: str) -> SetAsideDetailView:
    """Show a row with its content. Raise ``NotFound`` if it was not set aside."""
    note = _find(connection, kind, name)
    content = read_content(connection, kind, name)
    try:
        shown = None if content is None else msgspec.json.decode(content)
    except msgspec.DecodeError:  # it was cut at its maximum length
        shown = content
    return {**_view(note), "content": shown, "content_hidden": False}


def hide_content(row: SetAsideDetailView) -> SetAsideDetailView:
    """Return a row for those who may not see the contents of its account."""
    return {**row, "content": None, "content_hidden": row["content"] is not None}


async def owner_of(lookup: Lookup, kind: Kind, name: str) -> int | None:
    """Return the account of a request that was set aside; None if it is unknown, or no request."""
    if kind not in ("request", "outcome", "result"):
        return None
    try:
        found = await lookup.find(None, name, whole=False)
    except NotFound:
        return None
    return found.account_id


def resolve(connection: Connection, author: Author, kind: Kind, name: str, action: Action) -> None:
    """Record that a row is retried or released. Raise ``NotFound`` if it was not set aside."""
    note = _find(connection, kind, name)
    act: Act = "set_aside.release" if action == "release" else "set_aside.retry"
    record(connection, author, act, f"{kind} {name}", before=_view(note))


def retry(connection: Connection, author: Author, kind: Kind, name: str) -> None:
    """Retry a row soon. Raise ``NotFound`` if it was not set aside.

    Without its note, a request is retried by the sweeper and a price by each gateway. An outcome
    was abandoned with its request, and a result is only kept, so only their notes are deleted.
    """
    resolve(connection, author, kind, name, "retry")
    if kind == "batch":
        batches.retry_now(connection, name)
    delete_note(connection, kind, name)


def release(connection: Connection, author: Author, kind: Kind, name: str) -> None:
    """Close a row without a charge. Raise ``NotFound`` if it was not set aside."""
    resolve(connection, author, kind, name, "release")
    if kind == "request":
        settle(
            connection,
            [released(RequestId(name))],
            now=booking_time(connection),
            prices={},
            retention=timedelta(0),
        )
    elif kind == "batch":
        error = {"code": "released", "line": None, "message": RELEASED, "param": None}
        batches.fail(connection, name, error)
    delete_note(connection, kind, name)


def _find(connection: Connection, kind: Kind, name: str) -> Note:
    note = find_note(connection, kind, name)
    if note is None:
        raise NotFound("not_set_aside", f"No {kind} {name!r} is set aside.", param="name")
    return note


def _view(note: Note) -> SetAsideView:
    return {
        "object": "set_aside",
        "kind": note.kind,
        "name": note.name,
        "reason": note.reason,
        "times": note.times,
        "first_at": timestamp(note.first_at),
        "last_at": timestamp(note.last_at),
    }
