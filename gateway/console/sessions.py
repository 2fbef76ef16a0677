"""Cookies of the console, and from where a request comes."""

from __future__ import annotations

import ipaddress
from typing import Any, Final

from litestar import Request
from litestar.datastructures import Cookie

from gateway.accounts.sessions import AGENT_MAX, Origin, Session
from gateway.api.http.request import ApiRequest
from gateway.console.addresses import Address
from gateway.operations.entrance.sessions import Entrance, session_limits

CLEARED: Final = '"cache", "storage"'
"""What browsers delete when a session ends, besides its cookie."""


def session_token(request: Request[Any, Any, Any], address: Address) -> str | None:
    return request.cookies.get(address.cookie)


def session_cookie(address: Address, token: str, session: Session) -> Cookie:
    """Return the cookie of a session, which no script can read."""
    length = session.ends_at - session.proved_at
    return cookie(
        address, address.cookie, token, int(length.total_seconds()) if session.lasting else None
    )


def no_session_cookie(address: Address) -> Cookie:
    return cookie(address, address.cookie, "", 0)


def entrance_secret(request: Request[Any, Any, Any], address: Address) -> str:
    return request.cookies.get(_entrance_name(address), "")


def entrance_cookie(address: Address, secret: str) -> Cookie:
    """Return the cookie of a visitor who has not entered yet."""
    return cookie(address, _entrance_name(address), secret, None)


def origin_of(request: Request[Any, Any, Any]) -> Origin:
    """Return where a request comes from, by a network so wide that it is not personal."""
    agent = request.headers.get("user-agent", "")
    printable = "".join(each if each.isprintable() else " " for each in agent)
    return Origin(network_of(request, v4=24, v6=48), printable[:AGENT_MAX])


def network_of(request: Request[Any, Any, Any], *, v4: int, v6: int) -> str:
    """Return the network that a request comes from; empty if it is not known."""
    client = request.scope.get("client")
    address = client[0] if client else ""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    known = mapped or found
    return str(ipaddress.ip_network((known, v4 if known.version == 4 else v6), strict=False))


def entrance_of(request: ApiRequest, *, lasting: bool = False) -> Entrance:
    services = request.services
    return Entrance(
        origin=origin_of(request),
        lasting=lasting,
        limits=session_limits(services.settings),
        pepper=services.pepper,
    )


def _entrance_name(address: Address) -> str:
    return f"{address.cookie}-entrance"


def cookie(address: Address, name: str, value: str, max_age: int | None) -> Cookie:
    return Cookie(
        name,
        value=value,
        path="/",
        max_age=max_age,
        secure=address.https,
        httponly=True,
        samesite="lax",
    )
