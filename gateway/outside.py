"""Addresses that clients name: which may be called, and how, so that none leads inside.

A name is resolved once, every address that it has must be public, and the connection goes to the
very address that was checked. Redirects are the caller's to check, hop by hop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from gateway.errors import InvalidRequest

_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last four bytes are an address of the old kind."""


class PrivateAddress(Exception):
    """The address lies in a network that a client has no business in."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What to hand httpx so that it calls one address and still speaks to the host by its name."""

    url: str
    headers: dict[str, str]
    extensions: dict[str, Any]


def check_url(url: str, *, param: str, private_allowed: bool) -> str:
    """Accept an address or raise ``InvalidRequest``; names are resolved when calling."""
    schemes = ("https", "http") if private_allowed else ("https",)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in schemes or parts.username or parts.fragment:
        raise InvalidRequest(
            "invalid_value",
            f"{param} is no address of the form {schemes[0]}://host/path without credentials.",
            param=param,
        )
    try:
        public = is_public(host)
    except ValueError:
        return url
    if not (public or private_allowed):
        raise InvalidRequest(
            "invalid_value", f"{param} points to {host}, which is not public.", param=param
        )
    return url


async def pin(url: str, *, private_allowed: bool) -> Pinned:
    """Resolve an address's host. Raise ``PrivateAddress``, or ``OSError`` if it has none."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = await _resolve(parts.hostname or "", port, private_allowed=private_allowed)
    netloc = f"[{address}]" if ":" in address else address
    if parts.port:
        netloc += f":{parts.port}"
    return Pinned(
        urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, "")),
        headers={"Host": parts.netloc},
        extensions={"sni_hostname": parts.hostname},
    )


def is_public(address: str) -> bool:
    """Say whether anybody may be sent there. Raise ``ValueError`` if it is no IP address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        return inner is None or is_public(str(inner))
    return True


async def _resolve(host: str, port: int, *, private_allowed: bool) -> str:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no such host: {error}") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not private_allowed and not all(map(is_public, addresses)):
        raise PrivateAddress
    return addresses[0]
