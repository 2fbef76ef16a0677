"""Rate limit headers of responses: OpenAI's and the IETF's.

If several limits cover a call, OpenAI's headers describe the one with the least left; ``RateLimit``
and ``RateLimit-Policy`` (draft-ietf-httpapi-ratelimit-headers) list all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from litestar.datastructures import MutableScopeHeaders
from litestar.routes import BaseRoute, HTTPRoute
from litestar.types import Message, Scope

from gateway.accounts.rates import WINDOW_S, LimitUsage, Rates, wanted
from gateway.api.http.operations import CALL_HEADER
from gateway.errors import Unavailable
from gateway.requests.caller import Caller
from workers.contract.jobs import PromptWarning

ALIAS_HEADER: Final = "tollgate-model-alias"
WARNING_HEADER: Final = "tollgate-warning"
WARNED_MAX: Final = 500
"""Maximum length of the unknown words of a field in ``WARNING_HEADER``, in bytes."""
READABLE_HEADERS: Final = (
    "Location",
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    ALIAS_HEADER,
    WARNING_HEADER,
    "X-Budget-Exceeded",
    "X-Request-Cost",
    "X-Request-Id",
    "X-Should-Retry",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Response headers that CORS exposes to pages of allowed origins."""


async def add_limit_headers(message: Message, scope: Scope) -> None:
    """Litestar hook: add headers for the call's rate limits, a resolved alias, exceeded soft
    budgets, words that the model does not know, and the id of an administrator's call."""
    if message["type"] != "http.response.start":
        return
    if scope.get("method") == "OPTIONS":
        # Litestar's own response lists only the methods that were registered first. It answers
        # a preflight before it looks up the path.
        methods: Mapping[str, str] = scope["litestar_app"].state.methods
        if (allowed := methods.get(scope.get("path_template", ""))) is not None:
            MutableScopeHeaders.from_message(message)["Allow"] = allowed
        return
    state = scope["state"]
    if (call_id := state.get("call_id")) is not None:
        MutableScopeHeaders.from_message(message)[CALL_HEADER] = call_id
    call: Caller | None = state.get("call")
    if call is None or scope["route_handler"].opt.get("scope") != "inference":
        return
    usages = call.usages
    if usages is None:
        usages = await _look(scope["litestar_app"].state.services.rates, call)
    if not (usages or call.alias or call.soft_budgets_exceeded or call.warnings):
        return
    headers = MutableScopeHeaders.from_message(message)
    for name, value in limit_headers(usages).items():
        headers[name] = value
    if call.alias is not None:
        headers[ALIAS_HEADER] = " -> ".join(call.alias)
    if call.soft_budgets_exceeded:
        headers["X-Budget-Exceeded"] = ", ".join(
            quote(budget.name or f"budget {budget.id}", safe=" ")
            for budget in call.soft_budgets_exceeded
        )
    if call.warnings:
        headers[WARNING_HEADER] = ", ".join(map(_warning, call.warnings))


def allowed_methods(routes: Iterable[BaseRoute]) -> Mapping[str, str]:
    """Return the ``Allow`` header of each path."""
    found: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, HTTPRoute):
            found.setdefault(route.path_format, set()).update(route.methods)
    return {path: ", ".join(sorted(methods)) for path, methods in found.items()}


def limit_headers(usages: Sequence[LimitUsage]) -> Mapping[str, str]:
    """Return the headers for limits in use; none if the call is unlimited."""
    headers: dict[str, str] = {}
    for unit in ("requests", "tokens"):
        of_unit = [usage for usage in usages if usage.rate.unit == unit]
        if of_unit:
            least = min(of_unit, key=lambda usage: (usage.remaining, -usage.reset_s))
            headers[f"x-ratelimit-limit-{unit}"] = str(least.rate.per_minute)
            headers[f"x-ratelimit-remaining-{unit}"] = str(least.remaining)
            headers[f"x-ratelimit-reset-{unit}"] = duration(least.reset_s)
    if usages:
        headers["RateLimit-Policy"] = ", ".join(
            f'"{_name(usage)}";q={usage.rate.per_minute};w={WINDOW_S}' for usage in usages
        )
        headers["RateLimit"] = ", ".join(
            f'"{_name(usage)}";r={usage.remaining};t={usage.reset_s}' for usage in usages
        )
    return headers


def _warning(warning: PromptWarning) -> str:
    """Return the unknown words of a field, such as ``prompt;unknown="teal photo"``.

    They are encoded as in URLs, and those beyond ``WARNED_MAX`` are omitted.
    """
    words = [quote(word, safe="'") for word in warning.unknown]
    while len(shown := " ".join(words)) > WARNED_MAX:
        words.pop()
    return f'{warning.field};unknown="{shown}"'


def duration(seconds: int) -> str:
    """Format a duration as OpenAI does: ``45s``, ``6m0s``."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _name(usage: LimitUsage) -> str:
    """Return what a limit covers, such as ``key-requests`` or ``account-tokens-for-model``."""
    limit = usage.rate.limit
    who = "account" if limit.key_id is None else "key"
    return f"{who}-{usage.rate.unit}" + ("-for-model" if limit.model is not None else "")


async def _look(rates: Rates, call: Caller) -> Sequence[LimitUsage]:
    """Read the limits of a call that ended before it took from them, such as an invalid one."""
    key = call.key
    try:
        return await rates.look(wanted(key.limits, key.id, model="", tokens=0))
    except Unavailable:
        return ()
