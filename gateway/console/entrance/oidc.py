"""Entering by a provider of OpenID Connect, and the ends of sessions that it announces.

The login is bound to the browser by a signed cookie of ten minutes with its state, nonce and
verifier (PKCE). The same way back proves again who a visitor is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from litestar import Response, get, post
from litestar.datastructures import Cookie
from litestar.params import FromQuery
from litestar.response import Redirect

from gateway.api.http.request import ApiRequest
from gateway.console.addresses import Address, may_enter
from gateway.console.entrance.enter import HOME, attempt, entered, entrance_page, local_path
from gateway.console.entrance.logins import Login, LoginFailed
from gateway.console.guards import address_of, needs
from gateway.console.sessions import cookie, entrance_of, session_cookie
from gateway.console.visitors import CurrentVisitor, visitor_of
from gateway.errors import Forbidden, InvalidRequest
from gateway.operations.entrance import providers
from gateway.operations.entrance.providers import Person
from gateway.operations.entrance.sessions import Entered
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.console.entrance.provider import IdentityProvider

log = logging.getLogger(__name__)

RETURN_S: Final = 600
"""Time in which a person can log in at the provider."""
FAILED: Final = "The login at the provider did not succeed. Try again."
NO_GROUP: Final = "You are in none of the groups that may enter this console."


class _Begun(msgspec.Struct):
    """The content of the cookie."""

    state: str
    nonce: str
    verifier: str
    next: str
    proves: bool
    ends_at: float


def oidc_handlers(settings: Settings) -> list[Any]:
    """Return the routes; none without a provider."""
    if settings.oidc_issuer is None:
        return []
    # The library is an extra, and slow to import.
    from gateway.console.entrance.provider import IdentityProvider

    provider = IdentityProvider(settings)

    @get("/enter/oidc", opt={"open": True})
    async def begin(request: ApiRequest, next: FromQuery[str] = HOME) -> Response[Any]:
        if not may_enter(settings, address_of(request)):
            raise Forbidden("insecure_address", "The console cannot be entered without TLS here.")
        return await _begin(request, provider, next, proves=False)

    @get("/prove/oidc", guards=[needs("own.write")])
    async def prove(
        request: ApiRequest, visitor: CurrentVisitor, next: FromQuery[str] = HOME
    ) -> Response[Any]:
        return await _begin(request, provider, next, proves=True)

    @get("/enter/oidc/back", opt={"open": True})
    async def back(request: ApiRequest) -> Response[Any]:
        # Litestar reserves the name ``state`` of a parameter.
        query = request.query_params
        return await _back(request, provider, query.get("state", ""), query.get("code", ""))

    @post("/oidc/logout", opt={"open": True, "reports": True}, status_code=200)
    async def logout(request: ApiRequest) -> Response[Any]:
        """End the sessions that the provider names (OpenID Connect Back-Channel Logout)."""
        token = str((await request.form()).get("logout_token", ""))
        try:
            subject, sid = await provider.logout(token)
        except LoginFailed as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="logout_token") from None
        await request.services.database.write(
            lambda each: providers.end_by_provider(each, provider.issuer, subject, sid)
        )
        return Response(None, headers={"Cache-Control": "no-store"})

    return [begin, prove, back, logout]


async def _begin(
    request: ApiRequest, provider: IdentityProvider, next: str, *, proves: bool
) -> Response[Any]:
    login = Login(secrets.token_urlsafe(24), secrets.token_urlsafe(24), secrets.token_urlsafe(48))
    address = address_of(request)
    try:
        target = await provider.address(login, _way_back(address), again=proves)
    except LoginFailed as error:
        log.warning("nobody can log in at the provider: %s", error)
        return await entrance_page(request, next=next, message=FAILED, status=503)
    begun = _Begun(
        **asdict(login), next=local_path(next), proves=proves, ends_at=time.time() + RETURN_S
    )
    kept = _sign(msgspec.json.encode(begun), request.services.pepper)
    return Redirect(target, status_code=303, cookies=[_cookie(address, kept, RETURN_S)])


async def _back(
    request: ApiRequest, provider: IdentityProvider, state: str, code: str
) -> Response[Any]:
    address, settings = address_of(request), request.services.settings
    begun = _read(request.cookies.get(_name(address), ""), request.services.pepper)
    if begun is None or not hmac.compare_digest(begun.state.encode(), state.encode()) or not code:
        return await _failed(request, HOME, FAILED)
    login = Login(begun.state, begun.nonce, begun.verifier)

    async def ask() -> Person | None:
        try:
            claims = await provider.claims(login, code, _way_back(address))
        except LoginFailed as error:
            log.warning("a login at the provider failed: %s", error)
            return None
        return Person.of(claims, provider.issuer, settings)

    person = await attempt(request, "oidc", ask)
    if person is None:
        return await _failed(request, begun.next, FAILED)
    entrance, database = entrance_of(request), request.services.database
    visitor = visitor_of(request)
    if not begun.proves:
        found: Entered | None = await database.write(
            lambda each: providers.enter_by_provider(
                each, person, settings.oidc_role_map, entrance=entrance
            )
        )
        if found is None:
            return await _failed(request, begun.next, NO_GROUP)
        made = entered(request, found.token, found.session, begun.next)
    else:
        if visitor is None:
            return await _failed(request, begun.next, FAILED)
        session = visitor.session
        token = await database.write(
            lambda each: providers.prove_by_provider(each, session, person, entrance=entrance)
        )
        if token is None:
            return await _failed(request, begun.next, FAILED)
        target = "/console/prove/again" if session.pending else begun.next
        made = Redirect(target, status_code=303, cookies=[session_cookie(address, token, session)])
    made.set_cookie(_cookie(address, "", 0))
    return made


async def _failed(request: ApiRequest, next: str, message: str) -> Response[Any]:
    found = await entrance_page(request, next=next, message=message, status=403)
    found.set_cookie(_cookie(address_of(request), "", 0))
    return found


def _way_back(address: Address) -> str:
    return f"{address.origin}/console/enter/oidc/back"


def _name(address: Address) -> str:
    return f"{address.cookie}-oidc"


def _cookie(address: Address, value: str, max_age: int) -> Cookie:
    return cookie(address, _name(address), value, max_age)


def _sign(content: bytes, pepper: bytes) -> str:
    text = base64.urlsafe_b64encode(content).decode()
    return f"{text}.{_mac(text, pepper)}"


def _read(kept: str, pepper: bytes) -> _Begun | None:
    """Return the content of a cookie; None if it is not ours, or too old."""
    text, _, mac = kept.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(text, pepper).encode()):
        return None
    begun = msgspec.json.decode(base64.urlsafe_b64decode(text), type=_Begun)
    return begun if begun.ends_at > time.time() else None


def _mac(text: str, pepper: bytes) -> str:
    return hmac.new(pepper, b"console login " + text.encode(), hashlib.sha256).hexdigest()
