"""Guard of routes that leave something here: a file, a batch, a voice or a place for an upload.

It runs after the key was checked and before the body is read: an account that is suspended, has
nothing to spend, is at a limit per minute or has no room is refused at once.
"""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.accounts.rates import Rates, refuse_overrun, wanted
from gateway.api.http.access import call_of
from gateway.files.room import Room


async def may_store(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Litestar guard. Count the call in the requests per minute. Raise ``TollgateError``."""
    room: Room = connection.app.state.room
    rates: Rates = connection.app.state.rates
    call = call_of(connection)
    announced = connection.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() and handler.opt.get("stores_body") else 0
    await room.check(call.key.account_id, size=size)
    found = wanted(call.key.limits, call.key.id, "", tokens=0)
    call.taken = await rates.take([rate for rate in found if rate.unit == "requests"])
    refuse_overrun(call.taken.usages)
