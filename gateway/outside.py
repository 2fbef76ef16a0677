"""Addresses that clients name: what of them is refused at once. Pure.

What a name leads to is only known when it is called; ``workers.contract.addresses`` sees to that.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from gateway.errors import InvalidRequest
from workers.contract.addresses import is_public


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
