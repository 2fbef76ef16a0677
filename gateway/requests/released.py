"""What an operator does about rows that were set aside: have them tried again, or release them."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sqlalchemy import Connection

from gateway.aside import Kind, drop, is_set_aside
from gateway.batches import store as batches
from gateway.errors import NotFound
from gateway.ledger.closed import Problem
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import Settlement, settle
from workers.contract.jobs import RequestId

_MESSAGE: Final = "The request could not be run and was released by the operator."


def released(request_id: RequestId) -> Settlement:
    """The end of a request that the operator gave up: it failed, and is free."""
    problem = Problem("engine_error", _MESSAGE)
    return Settlement(request_id, "failed", "operator", billable=False, error=problem)


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
    drop(connection, kind, name)


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
        error = {"code": "released", "line": None, "message": _MESSAGE, "param": None}
        batches.give_up_for_good(connection, name, error)
    drop(connection, kind, name)
