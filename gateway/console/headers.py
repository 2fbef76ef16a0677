"""The headers of every answer of the console, and its content security policy."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from litestar import Request
from litestar.datastructures import MutableScopeHeaders
from litestar.types import Message, Scope

from gateway.api.front import is_console
from gateway.api.http.request import services_of
from gateway.console.addresses import public_address

CHECKOUT: Final = "https://checkout.stripe.com"
"""Where paying by card goes: browsers apply ``form-action`` to the redirect after a form."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self'; font-src 'self'; "
    "worker-src 'self'; form-action {targets}; base-uri 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types htmx; "
    "report-uri /console/csp"
)
_STATIC: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def new_nonce() -> str:
    return secrets.token_urlsafe(16)


def console_headers(
    request: Request[Any, Any, Any],
    nonce: str,
    *,
    secret: bool = False,
    microphone: bool = False,
) -> dict[str, str]:
    """Return the headers of a page. ``secret``: it shows a secret once, and is stored nowhere."""
    settings = services_of(request).settings
    public = public_address(settings)
    targets = "'self'" if settings.stripe_api_key is None else f"'self' {CHECKOUT}"
    recording = "(self)" if microphone else "()"
    headers = {
        "Content-Security-Policy": _POLICY.format(nonce=nonce, targets=targets),
        **_STATIC,
        "Permissions-Policy": (
            f"camera=(), geolocation=(), payment=(), usb=(), microphone={recording}"
        ),
        "Cache-Control": "no-store" if secret else "private, no-cache",
    }
    if public is not None and public.https:
        headers["Strict-Transport-Security"] = "max-age=31536000"
    return headers


async def add_console_headers(message: Message, scope: Scope) -> None:
    """Litestar hook: complete the headers of every answer under ``/console``, of redirects and
    errors as well."""
    if message["type"] != "http.response.start" or not is_console(scope["path"]):
        return
    headers = MutableScopeHeaders.from_message(message)
    for name, value in console_headers(Request(scope), new_nonce()).items():
        headers.setdefault(name, value)
