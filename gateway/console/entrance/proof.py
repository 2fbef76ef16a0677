"""Proving again who one is, before what moves much: with a new code, or the same key.

The form that was being sent is kept with the session, and shown once more afterwards.
"""

from __future__ import annotations

from typing import Any

from litestar import Controller, Response, get, post
from litestar.params import FromQuery
from litestar.response import Redirect

from gateway.api.http.request import ApiRequest
from gateway.console.entrance.enter import HOME, REFUSED, attempt, local_path
from gateway.console.guards import address_of, needs
from gateway.console.rendering import page
from gateway.console.sessions import entrance_of, session_cookie
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.operations.entrance import sessions
from gateway.operations.entrance.sessions import Credential


class ProofController(Controller):
    path = "/prove"
    guards = [needs("own.write")]

    @get("/")
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, next: FromQuery[str] = HOME
    ) -> Response[Any]:
        return await _page(request, visitor, next=next)

    @post("/")
    async def prove(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, database = await request.form(), request.services.database
        next = str(form.get("next", HOME))
        kind: Any = "key" if visitor.method == "key" else "code"
        proof = Credential.entered(kind, str(form.get("secret", "")))
        entrance = entrance_of(request)

        async def try_it() -> str | None:
            return await database.write(
                lambda each: sessions.prove(each, visitor.session, proof, entrance=entrance)
            )

        token = await attempt(request, visitor.method, try_it)
        if token is None:
            return await _page(request, visitor, next=next, message=REFUSED, status=403)
        target = "/console/prove/again" if visitor.session.pending else local_path(next)
        cookie = session_cookie(address_of(request), token, visitor.session)
        return Redirect(target, status_code=303, cookies=[cookie])

    @get("/again")
    async def again(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Show the form that was kept, to be sent once more."""
        pending = visitor.session.pending
        if pending is None:
            return Redirect(HOME, status_code=303)
        return await page(
            request,
            visitor,
            "entrance/again.html",
            title="Send it now?",
            secret=True,
            action=pending.path,
            fields=pending.fields,
        )


async def _page(
    request: ApiRequest, visitor: Visitor, *, next: str, message: str = "", status: int = 200
) -> Response[Any]:
    return await page(
        request,
        visitor,
        "entrance/prove.html",
        title="Confirm that it is you",
        status=status,
        secret=True,
        next=local_path(next),
        message=message,
    )
