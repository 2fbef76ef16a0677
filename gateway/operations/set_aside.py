"""What an operator does about rows that were set aside: have them tried again, or release them."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from gateway.aside import Kind, delete_note, is_set_aside
from gateway.batches import store as batches
from gateway.errors import NotFound
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import settle
from gateway.requests.settle import RELEASED, released
from workers.contract.jobs import RequestId


def check(connection: Connection, kind: Kind, name: str) -> None:
    """Raise ``NotFound`` if this was not set aside."""
    if not is_set_aside(connection, kind, name):
        raise NotFound("not_set_aside", f"No {kind} {name!r} is set aside.", param="name")


def retry(connection: Connection, kind: Kind, name: str) -> None:
    """Have a row tried again soon. Raise ``NotFound`` if it was not set aside.

    The sweeper takes up requests, and each gateway prices, by themselves; an outcome was given up
    with its request and only loses its note.
    """
    check(connection, kind, name)
    if kind == "batch":
        batches.retry_now(connection, name)
    delete_note(connection, kind, name)


def release(connection: Connection, kind: Kind, name: str) -> None:
    """Close what was set aside, for nothing. Raise ``NotFound`` if it was not set aside."""
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
