"""What visitors do with their own sessions: list and end them, and choose what they look at."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.budgets import read_zone
from gateway.accounts.sessions import THEMES, Choices, choose
from gateway.api.http.request import ApiRequest
from gateway.console.columns import ListColumns
from gateway.console.entrance.enter import HOME, local_path
from gateway.console.guards import address_of, needs
from gateway.console.rendering import page
from gateway.console.sessions import CLEARED, no_session_cookie
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound
from gateway.operations.accounts import find_owner
from gateway.operations.entrance import sessions
from gateway.operations.entrance.sessions import session_limits

LISTS: Final = (
    ListColumns(
        "sessions",
        {
            "with": "With",
            "network": "Network",
            "browser": "Browser",
            "seen": "Last seen",
            "ends": "Ends",
        },
    ),
)


class OwnController(Controller):
    guards = [needs("own.write")]

    @post("/leave")
    async def leave(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """End the session; the browser deletes its cookie and all that it stored."""
        await request.services.database.write(lambda each: sessions.leave(each, visitor.session))
        return Redirect(
            "/console/enter",
            status_code=303,
            cookies=[no_session_cookie(address_of(request))],
            headers={"Clear-Site-Data": CLEARED},
        )

    @get("/sessions")
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        limits = session_limits(request.services.settings)
        found = await request.services.database.read(
            lambda each: sessions.own_sessions(each, visitor.session, limits=limits)
        )
        return await page(
            request,
            visitor,
            "entrance/sessions.html",
            lists=LISTS,
            title="Your sessions",
            sessions=found,
            now=datetime.now(UTC),
        )

    @post("/sessions/{session_id:int}/end")
    async def end(
        self, request: ApiRequest, visitor: CurrentVisitor, session_id: FromPath[int]
    ) -> Response[Any]:
        await request.services.database.write(
            lambda each: sessions.end_own(each, visitor.session, session_id)
        )
        return Redirect("/console/sessions", status_code=303)

    @post("/sessions/end-others")
    async def end_others(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        await request.services.database.write(
            lambda each: sessions.end_others(each, visitor.session)
        )
        return Redirect("/console/sessions", status_code=303)

    @post("/preferences")
    async def prefer(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Choose an account, a time zone or a theme; fields that are not sent stay."""
        form = {name: str(value) for name, value in (await request.form()).items()}
        await request.services.database.write(
            lambda each: choose(each, visitor.session.id, _choices(each, visitor, form))
        )
        return Redirect(local_path(form.get("next", HOME)), status_code=303)


def _choices(connection: Connection, visitor: Visitor, form: dict[str, str]) -> Choices:
    """Check what was chosen. Raise ``NotFound`` for an account that the visitor may not see."""
    found = Choices()
    if "account" in form:
        name = form["account"].strip()
        found["account_id"] = find_owner(connection, name).id if name else None
        if name and not visitor.may("accounts.read", found["account_id"]):
            raise NotFound("account_not_found", f"Unknown account {name!r}.", param="account")
    if "zone" in form:
        zone = form["zone"].strip()
        try:
            found["zone"] = read_zone(zone).key if zone else None
        except ValueError as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="zone") from None
    if "theme" in form:
        sent = form["theme"]
        theme = next((each for each in THEMES if each == sent), None)
        if theme is None:
            raise InvalidRequest(
                "invalid_value", f"{sent!r} is not one of {', '.join(THEMES)}.", param="theme"
            )
        found["theme"] = theme
    return found
