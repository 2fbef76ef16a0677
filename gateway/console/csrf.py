"""Protection against forged forms: where a form comes from, and its token.

Every call that changes something needs a ``Sec-Fetch-Site`` of this origin (or its ``Origin``, from
older browsers) and a token derived from the session, in the field ``csrf`` or in a header. Forms of
the entrance have no session yet: their token is derived from a cookie that the page sets.

Pages are compressed, and the token of a session stays the same. So each page has it under a new
mask: the lengths of many pages tell nothing about it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, Final

from litestar import Request

from gateway.console.addresses import Address

FIELD: Final = "csrf"
HEADER: Final = "X-CSRF-Token"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def form_token(secret: bytes) -> str:
    """Return the token of a session's forms."""
    return hmac.new(secret, b"form", hashlib.sha256).hexdigest()


def new_entrance_secret() -> str:
    return secrets.token_urlsafe(24)


def entrance_token(secret: str, pepper: bytes) -> str:
    """Return the token of the entrance's forms; ``secret`` is in the visitor's cookie."""
    return hmac.new(pepper, b"console entrance " + secret.encode(), hashlib.sha256).hexdigest()


def comes_from(request: Request[Any, Any, Any], address: Address) -> bool:
    """Whether a browser states that a call was made by a page of an address."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return request.headers.get("origin") == address.origin


async def sent_token(request: Request[Any, Any, Any]) -> str:
    """Return the token that was sent with a call."""
    header = request.headers.get(HEADER)
    if header is not None:
        return header
    sent = (await request.form()).get(FIELD, "")
    return sent if isinstance(sent, str) else ""


def masked(token: str) -> str:
    """Return a token as one page has it: a random mask, and the token under it."""
    mask = secrets.token_bytes(len(token) // 2)
    return (mask + _xor(mask, bytes.fromhex(token))).hex()


def matches(sent: str, expected: str) -> bool:
    """Whether a sent token, masked or not, is the expected one."""
    if len(sent) == 2 * len(expected):
        sent = _unmasked(sent)
    return hmac.compare_digest(sent.encode(), expected.encode())


def _unmasked(sent: str) -> str:
    try:
        both = bytes.fromhex(sent)
    except ValueError:
        return ""
    if len(both) * 2 != len(sent):
        # Python skips blanks between the bytes.
        return ""
    half = len(both) // 2
    return _xor(both[:half], both[half:]).hex()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
