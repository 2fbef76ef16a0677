"""All routes of the console with what they need, from the application itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.accounts.roles import ROLES
from gateway.api.front import is_console
from gateway.console.guards import Needs
from gateway.console.navigation import PLACES
from gateway.console.roles import MAY, Act, AnyRole
from tests.console.seeding import Seeded


@dataclass(frozen=True)
class ConsoleRoute:
    method: str
    path: str
    act: Act | None
    """None: open to everybody."""

    def at(self, account_id: int) -> str:
        """Return a path of the route: about an account, and otherwise of what does not exist."""
        path = self.path.replace("{account_id}", str(account_id))
        return re.sub(r"\{[^}]*\}", "999999", path)

    @property
    def about_account(self) -> bool:
        return "{account_id}" in self.path


def console_routes(app: Litestar) -> list[ConsoleRoute]:
    """Return every route; each declares one act, or that it is open."""
    return sorted(_routes(app), key=lambda route: (route.path, route.method))


def _routes(app: Litestar) -> Iterator[ConsoleRoute]:
    for route in app.routes:
        if isinstance(route, HTTPRoute) and is_console(route.path):
            for handler in route.route_handlers:
                yield from _of(handler, route.path_format)


def _of(handler: HTTPRouteHandler, path: str) -> Iterator[ConsoleRoute]:
    acts = [guard.act for guard in handler.resolve_guards() if isinstance(guard, Needs)]
    for method in handler.http_methods - {"OPTIONS", "HEAD"}:
        assert len(acts) == (0 if handler.opt.get("open") else 1), f"{method} {path}: {acts}"
        yield ConsoleRoute(str(method), path, acts[0] if acts else None)


NO_PAGES = {
    "/console/access": "leads to the page of the account",
    "/console/assets/{digest}/{name}": "a file",
    "/console/catalog/text": "a file",
    "/console/feedback/file": "a file",
    "/console/files/{file_id}/content": "a file",
    "/console/live": "a stream",
    "/console/playground/sound/{request_id}": "a stream",
    "/console/prove/again": "a form that was kept",
    "/console/requests/file": "a file",
    "/console/requests/{request_id}/output": "a file",
    "/console/requests/{request_id}/attachments/{position}": "a file",
    "/console/requests/{request_id}/files": "a file",
    "/console/requests/{request_id}/media/{position}": "a file",
    "/console/usage/file": "a file",
    "/console/voices/{id}/recording": "a file",
    "/console/{rest}": "whatever does not exist",
}
"""GET routes that answer with something else than a page."""
NOT_SEEDED = {
    "/console/docs/types/{name}": "tests/console/test_installation.py",
    "/console/ledger/{entry_id}": "tests/console/test_pages.py",
    "/console/statements/{month}/credit-note": "tests/console/test_money.py",
    "/console/batches/{batch_id}": "tests/console/test_stored.py",
    "/console/jobs/{job_id}": "tests/console/browser/test_failing_parts.py",
    "/console/payments/{payment_id}": "tests/console/test_money.py",
    "/console/queue/cancel/{request_id}": "tests/console/test_running.py",
    "/console/queue/requeue": "tests/console/test_running.py",
    "/console/limits/rates/remove": "tests/console/test_limits.py",
    "/console/set-aside/row": "tests/console/test_set_aside.py",
    "/console/notices/{subscription_id}/remove": "tests/console/test_notices.py",
    "/console/organisations/{organisation_id}": "tests/console/test_organisations.py",
    "/console/organisations/{organisation_id}/accounts/{account_number}/remove": (
        "tests/console/test_organisations.py"
    ),
    "/console/organisations/{organisation_id}/statements/{month}": (
        "tests/console/test_organisations.py"
    ),
    "/console/workers/{worker}": "tests/console/test_running.py",
    "/console/workers/{worker}/{act}": "tests/console/test_running.py",
}
"""Pages about what the traffic of ``seeding.seed`` does not make, and where they are tested."""
PRICE = (
    "unit=input_token&amount=0.03&per=1000000&when=&unit=output_token&amount=0.1&per=1000000&when="
)
MORE = {
    "/console/compare": ("?model=echo&model=Veo3",),
    "/console/credit/chargeback": (
        "?account=atlas",
        "?account=atlas&amount=1&reason=r&reference=x&do=review",
    ),
    "/console/credit/new": ("?account=atlas",),
    "/console/docs": ("", "?q=chat"),
    "/console/pick": ("", "?task=text-generation"),
    "/console/playground": ("", "?task=text-completion", "?model=Veo3"),
    "/console/plan": ("", "?model=llama-3.3-70b&gpu=H200,H100&hour=3&dtype=fp8"),
    "/console/prices/{name}": ("", f"?{PRICE}&do=look", f"?{PRICE}&reason=dearer&do=review"),
    "/console/requests/{request_id}": ("", "#open"),
    "/console/usage": ("?by=day", "?by=model", "?by=day&by2=model&vs=before"),
    "/console/usage/charges": ("?from=2026-01-01",),
}
"""Queries with which a page shows more; ``#open``: about what is still open."""


def pages_of(app: Litestar, role: AnyRole, seeded: Seeded) -> list[str]:
    """Return the address of every page that a role sees, with what ``seeding.seed`` made."""
    return list(_pages(app, role, seeded))


def _pages(app: Litestar, role: AnyRole, seeded: Seeded) -> Iterator[str]:
    requests = seeded.requests["atlas"]
    month = datetime.now(UTC).strftime("%Y-%m")
    found = {
        "account_id": seeded.accounts["atlas"].id,
        "key_id": seeded.keys["web"].id,
        "entry_id": 1,
        "user_id": 1,
        "month": month,
        "name": "echo",
        "operation": "CreateChatCompletion",
    }
    for route in console_routes(app):
        known = {*NO_PAGES, *NOT_SEEDED}
        if route.method != "GET" or route.path in known:
            continue
        if route.act is not None and role not in MAY[route.act]:
            continue
        if route.path in (_OF_MEMBERS if role in ROLES else _OF_INSTALLATION):
            continue
        for query in MORE.get(route.path, ("",)):
            request = requests[-1] if query == "#open" else requests[-3]
            values = {**found, "request_id": request}
            path = re.sub(r"\{(\w+)\}", lambda each, of=values: str(of[each[1]]), route.path)
            needs_account = role in ROLES and route.path in _OF_ACCOUNT and "account=" not in query
            yield path + query.partition("#")[0] + ("?account=atlas" if needs_account else "")


_OF_ACCOUNT = {
    *(place.path for _, places in PLACES for place in places if place.is_of_account),
    "/console/statements/{month}",
}
_OF_MEMBERS = {"/console/keys/new"}
"""Pages that need a chosen account."""
_OF_INSTALLATION = {"/console"}
"""Pages that lead members elsewhere."""
