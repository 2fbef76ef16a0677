"""Rows that were set aside: list, retry, release."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.aside import Kind, delete_note, is_set_aside, list_notes
from gateway.batches import store as batches
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import settle
from gateway.requests.settle import RELEASED, released
from workers.contract.jobs import RequestId


class SetAsideView(TypedDict):
    """A stored row that could not be processed."""

    object: Literal["set_aside"]
    kind: Kind
    name: str
    reason: str
    times: int
    first_at: str
    last_at: str


def list_all(connection: Connection, *, limit: int) -> list[SetAsideView]:
    """List what is set aside, newest first."""
    return [
        {
            "object": "set_aside",
            "kind": note.kind,
            "name": note.name,
            "reason": note.reason,
            "times": note.times,
            "first_at": timestamp(note.first_at),
            "last_at": timestamp(note.last_at),
        }
        for note in list_notes(connection, limit=limit)
    ]


def check(connection: Connection, kind: Kind, name: str) -> None:
    """Raise ``NotFound`` if a row was not set aside."""
    if not is_set_aside(connection, kind, name):
        raise NotFound("not_set_aside", f"No {kind} {name!r} is set aside.", param="name")


def retry(connection: Connection, kind: Kind, name: str) -> None:
    """Retry a row soon. Raise ``NotFound`` if it was not set aside.

    Without its note, a request is retried by the sweeper and a price by each gateway. An outcome
    was abandoned with its request, so only its note is deleted.
    """
    check(connection, kind, name)
    if kind == "batch":
        batches.retry_now(connection, name)
    delete_note(connection, kind, name)


def release(connection: Connection, kind: Kind, name: str) -> None:
    """Close a row without a charge. Raise ``NotFound`` if it was not set aside."""
    check(connection, kind, name)
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
