"""SSRF guard: checks the URLs that clients supply before a request is accepted. Pure.

The address of a host name is only known when the URL is called; ``workers.contract.addresses``
checks it then.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

import httpx

from gateway.errors import InvalidRequest
from workers.contract.addresses import is_public, read_url

_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
HOST_CHARACTERS_MAX: Final = 253
"""Length of a host name (RFC 1035), without the dot at its end."""


def check_public_url(url: str, *, param: str, private_allowed: bool) -> str:
    """Accept a URL or raise ``InvalidRequest``; names are resolved when the URL is called."""
    schemes = ("https", "http") if private_allowed else ("https",)
    parsed = _parsed(url)
    if parsed is None or parsed.scheme not in schemes:
        raise InvalidRequest(
            "invalid_value",
            f"{param} is not a valid URL of the form {schemes[0]}://host/path; credentials, a "
            "fragment, spaces, backslashes and control characters are not accepted.",
            param=param,
        )
    host = parsed.raw_host.decode("ascii")
    try:
        public = is_public(host)
    except ValueError:
        return url
    if not (public or private_allowed):
        raise InvalidRequest(
            "invalid_value", f"{param} points to {host}, which is not public.", param=param
        )
    return url


def host_of(url: str) -> str:
    """Return host and port of a stored URL as they are called, or "" if it cannot be read."""
    try:
        return read_url(url).netloc.decode("ascii")
    except OSError:
        return ""


def _parsed(url: str) -> httpx.URL | None:
    """Return the parsed URL, or None if any client library could read it in another way."""
    if any(unicodedata.category(character)[0] in "CZ" for character in url) or "\\" in url:
        return None
    try:
        parsed = read_url(url)
    except OSError:
        return None
    authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
    if "@" in authority or "#" in url or parsed.port == 0 or (parsed.port or 0) > 65_535:
        return None
    return parsed if _is_host(parsed.raw_host.decode("ascii")) else None


def _is_host(host: str) -> bool:
    if ":" in host:
        return True
    name = host.removesuffix(".")
    return len(name) <= HOST_CHARACTERS_MAX and all(map(_LABEL.fullmatch, name.split(".")))
