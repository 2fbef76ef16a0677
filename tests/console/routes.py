"""All routes of the console with what they need, from the application itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.console.guards import Needs
from gateway.console.headers import is_console
from gateway.console.roles import Act


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
