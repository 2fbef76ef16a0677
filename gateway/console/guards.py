"""Guards of the console: the address, the session, forged forms, roles and recent proofs.

The first three are those of every route. A route is closed unless it declares an act (``needs``) or
that it is open to everybody (``opt={"open": True}``); one without either does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from sqlalchemy import Connection

from gateway.accounts.sessions import (
    SEEN,
    PendingForm,
    SessionRevoked,
    keep_form,
    note_seen,
)
from gateway.api.http.request import ApiRequest, services_of
from gateway.console.addresses import Address, find_address
from gateway.console.csrf import FIELD, SAFE, comes_from, entrance_token, matches, sent_token
from gateway.console.roles import Act
from gateway.console.sessions import entrance_secret, origin_of, session_token
from gateway.console.visitors import Visitor, visitor_of, visitor_of_session
from gateway.errors import Forbidden, NotFound, TollgateError
from gateway.operations.entrance.content_grants import sight_of
from gateway.operations.entrance.sessions import refuse, refuse_revoked, resume, session_limits
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import for_page

PROVED: Final = timedelta(minutes=10)
"""Time for which a proof of who the visitor is admits what moves much."""

REFUSALS_PER_MINUTE: Final = 30
"""Refusals of one session that are recorded, so that it cannot fill the audit log."""
MUCH_NANOS: Final = 10 * NANOS_PER_USD
"""Refund or credit beyond which a visitor has to prove who it is."""
PENDING_MAX: Final = 16_000
"""Characters of a form that is kept until the visitor has proved who it is."""
_UNREADABLE: Final = (LookupError, TypeError, ValueError)
FOLLOWS: Final = "tollgate-follows"
"""Header of calls that a page makes by itself to stay up to date."""

AnyConnection = ASGIConnection[Any, Any, Any, Any]


class Misdirected(TollgateError):
    """A ``Host`` that is not one of the console's."""

    status = 421


class NotEntered(Exception):
    """A visitor without a session asks for a page."""


class ProofNeeded(Exception):
    """A visitor has to prove again who it is."""


async def check_host(connection: AnyConnection, _: BaseRouteHandler) -> None:
    """Refuse any address but the console's own."""
    settings = services_of(connection).settings
    host = connection.headers.get("host", "")
    address = find_address(settings, host)
    if address is None:
        raise Misdirected(
            "misdirected",
            f"The console is not served at {host!r}. Set TOLLGATE_PUBLIC_URL to the address that "
            f"people use, or open http://127.0.0.1:{settings.port}/console on the machine itself.",
        )
    connection.scope["state"]["address"] = address


async def find_visitor(connection: AnyConnection, handler: BaseRouteHandler) -> None:
    """Find the visitor of the cookie. Raise ``NotEntered`` unless the route is open."""
    assert isinstance(connection, ApiRequest)
    if handler.opt.get("same_for_all"):
        return  # The page of an outage needs its files while the database is away.
    is_open = bool(handler.opt.get("open"))
    # What a page does by itself is no sign that somebody is there.
    is_use = not (handler.opt.get("unattended") or FOLLOWS in connection.headers)
    visitor = await current_visitor(connection, is_use=is_use)
    # From here on, what the page reads can neither wait for long nor delay an order.
    for_page.set(connection.method in SAFE)
    if visitor is not None:
        connection.scope["state"]["visitor"] = visitor
    elif not is_open:
        raise NotEntered
    if not is_open and not any(isinstance(each, Needs) for each in handler.resolve_guards()):
        raise no_page()


async def current_visitor(request: ApiRequest, *, is_use: bool = False) -> Visitor | None:
    """Return the visitor of the cookie as it is now; None if it has no session. ``is_use``: its
    session continues, because it does something."""
    (found,) = await current_visitors([request])
    if isinstance(found, Exception):
        raise found
    now = datetime.now(UTC)
    if is_use and found is not None and found.session.seen_at + SEEN <= now:
        id = found.session.id
        write = request.services.database.write
        await write(lambda connection: note_seen(connection, id, now), durable=False)
    return found


async def current_visitors(requests: Sequence[ApiRequest]) -> Sequence[Visitor | Exception | None]:
    """Return the visitors of cookies as they are now, read together; None for one that has no
    session, and an error for one whose row cannot be read."""
    services = requests[0].services
    tokens = [session_token(each, address_of(each)) for each in requests]
    limits = session_limits(services.settings)

    def find(connection: Connection, token: str | None) -> Visitor | Exception | None:
        if token is None:
            return None
        try:
            session = resume(connection, token, limits=limits, pepper=services.pepper)
            if session is None:
                return None
            return visitor_of_session(session, sight_of(connection, session.identity))
        except (SessionRevoked, *_UNREADABLE) as error:
            return error

    def read(connection: Connection) -> list[Visitor | Exception | None]:
        return [find(connection, token) for token in tokens]

    found = await services.database.read(read) if any(tokens) else [None] * len(tokens)
    for place, one in enumerate(found):
        if isinstance(one, SessionRevoked):
            refused = partial(refuse_revoked, error=one, origin=origin_of(requests[place]))
            await services.database.write(refused)
            found[place] = None
    return found


async def check_form(connection: AnyConnection, handler: BaseRouteHandler) -> None:
    """Refuse a call that changes something, but was not sent by a form of the console."""
    assert isinstance(connection, ApiRequest)
    if connection.method in SAFE or handler.opt.get("reports"):
        return
    visitor, address = visitor_of(connection), address_of(connection)
    if handler.opt.get("open"):
        # Also for a visitor who has entered, and enters once more.
        pepper = services_of(connection).pepper
        expected = entrance_token(entrance_secret(connection, address), pepper)
    else:
        assert visitor is not None
        expected = visitor.csrf
    if not comes_from(connection, address):
        why = "the form was sent by another site"
    elif not matches(await sent_token(connection), expected):
        why = "the form has no token of this session"
    else:
        return
    if visitor is not None:
        await _record_refusal(connection, visitor, why)
    raise Forbidden("forged_form", f"Nothing was changed: {why}. Open the page again and repeat.")


class Needs:
    """Guard of a route: the visitor must be allowed to do an act.

    A path parameter ``account_id`` is the account in question, otherwise the one looked at. What a
    visitor may not see does not exist.
    """

    def __init__(self, act: Act) -> None:
        self.act = act

    async def __call__(self, connection: AnyConnection, _: BaseRouteHandler) -> None:
        assert isinstance(connection, ApiRequest)
        visitor = visitor_of(connection)
        assert visitor is not None
        account_id: int | None = connection.path_params.get("account_id")
        if visitor.may(self.act, account_id):
            return
        if connection.method not in SAFE:
            await _record_refusal(connection, visitor, f"{self.act} is not allowed")
        raise no_page()


def needs(act: Act) -> Needs:
    return Needs(act)


async def proved(connection: AnyConnection, _: BaseRouteHandler) -> None:
    """Guard of a route that moves much: the visitor must have proved lately who it is."""
    assert isinstance(connection, ApiRequest)
    await require_proof(connection)


async def require_proof(request: ApiRequest, *, keep_max: int = PENDING_MAX) -> None:
    """Raise ``ProofNeeded`` unless the visitor has proved lately who it is.

    A form that was sent is kept until then, if it has at most ``keep_max`` characters.
    """
    visitor = visitor_of(request)
    assert visitor is not None
    session, is_form = visitor.session, request.method not in SAFE
    late = visitor.proved_at + PROVED <= datetime.now(UTC)
    if is_form and (late or session.pending is not None):
        form = await _to_keep(request, keep_max) if late else None
        await request.services.database.write(lambda each: keep_form(each, session.id, form))
    if late:
        raise ProofNeeded


async def require_proof_of(request: ApiRequest, amount_nanos: int) -> None:
    """Raise ``ProofNeeded`` if an amount is much, as ``require_proof`` does."""
    if amount_nanos > MUCH_NANOS:
        await require_proof(request)


async def _to_keep(request: ApiRequest, keep_max: int) -> PendingForm | None:
    """Return the form of a request without its token; None if it has files or is too long."""
    sent = (await request.form()).multi_items()
    fields = [(name, value) for name, value in sent if name != FIELD and isinstance(value, str)]
    long = sum(len(name) + len(value) for name, value in fields) > keep_max
    files = any(not isinstance(value, str) for _, value in sent)
    return None if long or files else PendingForm(path_of(request), fields)


def path_of(request: ApiRequest) -> str:
    """Return the path of a request, with its query."""
    query = request.scope["query_string"].decode("latin-1")
    return request.scope["path"] + (f"?{query}" if query else "")


def address_of(connection: AnyConnection) -> Address:
    """Return the address that ``check_host`` found."""
    address: Address = connection.scope["state"]["address"]
    return address


def no_page() -> NotFound:
    return NotFound("not_found", "This page does not exist.")


async def _record_refusal(request: ApiRequest, visitor: Visitor, why: str) -> None:
    """Record a refusal, unless the session had too many within this minute."""
    if not request.services.attempts.may_record(visitor.session.id, REFUSALS_PER_MINUTE):
        return
    where = f"{request.method} {request.scope['path']}: {why}"[:500]
    origin = origin_of(request)
    await request.services.database.write(
        lambda each: refuse(each, visitor.session, where, origin=origin, call_id=visitor.call_id)
    )
