"""Addresses that somebody else names: which may be called, and how, so that none leads inside.

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

_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last four bytes are an address of the old kind."""


class PrivateAddress(Exception):
    """The address lies in a network that nobody outside has business in."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What to hand httpx so that it calls one address and still speaks to the host by its name."""

    url: str
    headers: dict[str, str]
    extensions: dict[str, Any]


async def pin(url: str, *, private_allowed: bool) -> Pinned:
    """Resolve an address's host. Raise ``PrivateAddress``, or ``OSError`` if it has none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise OSError("no address") from error
    default = 443 if parts.scheme == "https" else 80
    address = await _resolve(host, port or default, private_allowed=private_allowed)
    netloc = f"[{address}]" if ":" in address else address
    if port:
        netloc += f":{port}"
    return Pinned(
        urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, "")),
        headers={"Host": parts.netloc.rpartition("@")[2]},
        extensions={"sni_hostname": host},
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
    if not addresses:
        raise OSError("no such host")
    if not private_allowed and not all(map(is_public, addresses)):
        raise PrivateAddress
    return addresses[0]
