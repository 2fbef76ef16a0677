"""The addresses at which the console can be reached: that of ``TOLLGATE_PUBLIC_URL``, and loopback.

Any other ``Host`` is refused, so that a name of somebody else's that resolves to this machine does
not reach its console. Whether a page is served over https is known from the settings, never from a
header. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.settings import Settings

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """An address of the console, as browsers know it."""

    origin: str
    loopback: bool

    @property
    def https(self) -> bool:
        return self.origin.startswith("https://")

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers accept the prefix from https only, without a domain."""
        return "__Host-tollgate" if self.https else "tollgate"


def find_address(settings: Settings, host: str) -> Address | None:
    """Return the address that a ``Host`` header names; None if it is not one of the console's."""
    name = host.lower()
    public = public_address(settings)
    if public is not None and _netloc(public.origin) == _with_port(name, public.origin):
        return public
    for each in LOOPBACK:
        if name == f"{each}:{settings.port}" or (settings.port == 80 and name == each):
            return Address(f"http://{name}", loopback=True)
    return None


def public_address(settings: Settings) -> Address | None:
    """Return the address of ``TOLLGATE_PUBLIC_URL``, if it is set."""
    if settings.public_url is None:
        return None
    parts = urlsplit(settings.public_url.lower())
    name = parts.netloc.rpartition("@")[2]
    default = f":{_PORTS.get(parts.scheme, '')}"
    host = parts.hostname or ""
    loopback = host == "localhost" or host == "::1" or host.startswith("127.")
    return Address(f"{parts.scheme}://{name.removesuffix(default)}", loopback=loopback)


def may_enter(settings: Settings, address: Address) -> bool:
    """Whether a session can be opened at an address: not where others could read the cookie."""
    return address.https or address.loopback or settings.console_insecure


def _netloc(origin: str) -> str:
    return origin.partition("://")[2]


def _with_port(name: str, origin: str) -> str:
    """Return a host without the default port of a scheme."""
    return name.removesuffix(f":{_PORTS.get(origin.partition('://')[0], '')}")
