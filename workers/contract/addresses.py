"""SSRF guard: resolves untrusted URLs, and rejects hosts with private addresses.

A name is resolved once, all of its addresses must be public, and the connection is pinned to an
address that was checked. The caller must check redirects, hop by hop.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Final

import httpx

from workers.contract.resolver import HostResolver

_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""NAT64 (RFC 6052): the last four bytes are an IPv4 address."""

_CLOSED: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        # https://www.iana.org/assignments/iana-ipv4-special-registry, as of 2026-11; listed here
        # because Python's own list is as old as the interpreter.
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
        # https://www.iana.org/assignments/iana-ipv6-special-registry, and forms of IPv4 addresses:
        # compatible, translated (RFC 2765), local NAT64.
        "::/96",
        "::ffff:0:0:0/96",
        "64:ff9b:1::/48",
        "100::/64",
        "100:0:0:1::/64",
        "2001::/23",
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
"""Non-public networks, in addition to those that Python knows."""
_resolver: Final = HostResolver()


class InvalidUrl(OSError):
    """The URL is malformed or has no host."""


class PrivateAddress(Exception):
    """The host has a non-public address."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Arguments for httpx that pin a request to one address and keep the host's name."""

    url: str
    headers: dict[str, str]
    extensions: dict[str, Any]


async def pin(url: str, *, private_allowed: bool, owner: str = "") -> Pinned:
    """Resolve a URL's host for an account (``owner``).

    Raise ``PrivateAddress``, or ``OSError`` if the host has no address or the account has too many
    pending lookups.
    """
    parsed = read_url(url)
    host = parsed.raw_host.decode("ascii")
    default = 443 if parsed.scheme == "https" else 80
    addresses = await _resolver.resolve(host, parsed.port or default, owner=owner)
    if not private_allowed and not all(map(is_public, addresses)):
        raise PrivateAddress
    return Pinned(
        str(parsed.copy_with(host=addresses[0], userinfo=b"", fragment=None)),
        headers={"Host": parsed.netloc.decode("ascii")},
        extensions={"sni_hostname": host},
    )


def read_url(url: str) -> httpx.URL:
    """Parse a URL, its host in IDNA form. Raise ``InvalidUrl``."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidUrl("not a valid URL") from error
    if not parsed.raw_host:
        raise InvalidUrl("the URL has no host")
    return parsed


def is_public(address: str) -> bool:
    """Whether an IP address is public. Raise ``ValueError`` if it is malformed."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast:
        return False
    if any(found in network for network in _CLOSED if network.version == found.version):
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        return inner is None or is_public(str(inner))
    return True
