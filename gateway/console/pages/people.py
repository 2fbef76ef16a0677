"""People: users of the installation with their roles and sessions, and members of an account."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.roles import MEMBER_ROLES, ROLES, Role
from gateway.accounts.sessions import of_user
from gateway.accounts.users import USER_STATUSES, UserStatus, find_user, list_members
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, proved
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.operations import users
from gateway.operations.entrance import invitations, sessions
from gateway.operations.entrance.invitations import InvitationBody
from gateway.operations.entrance.links import LinkBody, LoginLinkView, create_link
from gateway.operations.entrance.sessions import session_limits
from gateway.operations.users import MemberBody, UserBody, UserChange, UserView

LISTS: Final = (
    ListColumns(
        "users",
        {
            "address": "Address",
            "role": "Role",
            "accounts": "Accounts",
            "state": "State",
        },
    ),
    ListColumns(
        "members",
        {
            "address": "Address",
            "role": "Role",
            "state": "State",
        },
    ),
    ListColumns(
        "user_sessions",
        {
            "entered": "Entered",
            "with": "With",
            "network": "Network",
            "browser": "Browser",
            "seen": "Last seen",
        },
    ),
)


class UserPages(Controller):
    path = "/users"

    @get(guards=[needs("users.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _users_page(request, visitor)

    @post(guards=[needs("users.write"), proved])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(UserBody, _given(form, "name", "email", "role"))
            made = await request.services.database.write(
                lambda each: users.create(each, visitor.author(), body)
            )
        except TollgateError as error:
            return await _users_page(request, visitor, form.values(), error)
        return see_other(f"/console/users/{made['id']}")

    @get("/sessions", guards=[needs("users.read")])
    async def all_sessions(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """List the open sessions of everybody."""
        query, limits = Query(request), session_limits(request.services.settings)
        found, more = await request.services.database.report(
            lambda each: sessions.all_sessions(
                each, limits=limits, limit=ROWS, cursor=query.text("cursor")
            ),
            account_id=None,
        )
        return await page(
            request,
            visitor,
            "people/sessions.html",
            lists=LISTS,
            title="Open sessions",
            sessions=found,
            pager=query.pages(more),
        )

    @post("/sessions/{session_id:int}/end", guards=[needs("users.write")])
    async def end_session(
        self, request: ApiRequest, visitor: CurrentVisitor, session_id: FromPath[int]
    ) -> Redirect:
        await request.services.database.write(
            lambda each: sessions.end_any(each, visitor.author(), session_id)
        )
        return see_other("/console/users/sessions")

    @get("/{user_id:int}", guards=[needs("users.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, user_id: FromPath[int]
    ) -> Response[str]:
        return await _user_page(request, visitor, user_id)

    @post("/{user_id:int}", guards=[needs("users.write"), proved])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, user_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            sent = {
                "name": form.text("name") or "",
                "email": form.text("email"),
                "role": form.text("role"),
                "status": form.text("status") or "active",
            }
            body, author = read_body(UserChange, sent), visitor.author(form.text("reason") or "")
            await request.services.database.write(
                lambda each: users.change(each, author, str(user_id), body)
            )
        except TollgateError as error:
            return await _user_page(request, visitor, user_id, form.values(), error)
        return see_other(f"/console/users/{user_id}")

    @post("/{user_id:int}/link", guards=[needs("users.write"), proved])
    async def link(
        self, request: ApiRequest, visitor: CurrentVisitor, user_id: FromPath[int]
    ) -> Response[Any]:
        body, pepper = LinkBody(user=user_id), request.services.pepper
        try:
            made = await request.services.database.write(
                lambda each: create_link(each, visitor.author(), body, pepper=pepper)
            )
        except TollgateError as error:
            return await _user_page(request, visitor, user_id, error=error)
        return await _link_page(request, visitor, made, f"/console/users/{user_id}")

    @post("/{user_id:int}/end-sessions", guards=[needs("users.write")])
    async def end_sessions(
        self, request: ApiRequest, visitor: CurrentVisitor, user_id: FromPath[int]
    ) -> Redirect:
        await request.services.database.write(
            lambda each: sessions.end_all_of(each, visitor.author(), user_id)
        )
        return see_other(f"/console/users/{user_id}")


class MemberPages(Controller):
    path = "/members"

    @get(guards=[needs("members.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _members_page(request, visitor)

    @post(guards=[needs("members.write"), proved])
    async def invite(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        account, form = await _account(request, visitor, "members.write"), await read_form(request)
        try:
            body = read_body(InvitationBody, _given(form, "name", "email", "role"))
            pepper = request.services.pepper
            _, link = await request.services.database.write(
                lambda each: invitations.invite(
                    each, visitor.author(), account.id, body, pepper=pepper
                )
            )
        except TollgateError as error:
            return await _members_page(request, visitor, form.values(), error)
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return see_other(back) if link is None else await _link_page(request, visitor, link, back)

    @post("/{user_id:int}", guards=[needs("members.write"), proved])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, user_id: FromPath[int]
    ) -> Response[Any]:
        """Change a member's role, end the membership, or make another link, by the button."""
        account, form = await _account(request, visitor, "members.write"), await read_form(request)
        author, pepper, write = (
            visitor.author(),
            request.services.pepper,
            (request.services.database.write),
        )
        keep_owner = visitor.role is None
        back = f"/console/members?account=id:{account.id}"
        try:
            match form.text("act"):
                case "remove":
                    await write(
                        lambda each: invitations.remove(
                            each, author, account.id, user_id, keep_owner=keep_owner
                        )
                    )
                case "link":
                    link = await write(
                        lambda each: invitations.invite_again(
                            each, author, account.id, user_id, pepper=pepper
                        )
                    )
                    return await _link_page(request, visitor, link, back)
                case _:
                    body = read_body(MemberBody, {"role": form.text("role")})
                    await write(
                        lambda each: invitations.change_role(
                            each, author, account.id, user_id, body, keep_owner=keep_owner
                        )
                    )
        except TollgateError as error:
            return await _members_page(request, visitor, None, error)
        return see_other(back)


async def _users_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query = Query(request)
    role = cast("Role | None", query.one_of("role", ROLES))
    status = cast("UserStatus | None", query.one_of("status", USER_STATUSES))
    found, more = await request.services.database.report(
        lambda each: users.list_page(
            each, role=role, status=status, limit=ROWS, cursor=query.text("cursor")
        ),
        account_id=None,
    )
    return await page(
        request,
        visitor,
        "people/users.html",
        lists=LISTS,
        title="Users",
        status=error.http_status if error else 200,
        rows=found,
        roles=ROLES,
        statuses=USER_STATUSES,
        filters=query.values,
        narrowed=bool(query.narrowed),
        pager=query.pages(more),
        values=values or {},
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


async def _user_page(
    request: ApiRequest,
    visitor: Visitor,
    user_id: int,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    limits = session_limits(request.services.settings)

    def read(connection: Connection) -> tuple[UserView, list[Any]] | None:
        try:
            found = find_user(connection, str(user_id))
        except LookupError:
            return None
        (view,) = users.views(connection, [found])
        return view, sessions.list_of(connection, of_user(user_id), limits=limits)

    found = await request.services.database.report(read, account_id=None)
    if found is None:
        raise NotFound("not_found", "There is no such user.")
    user, opened = found
    shown = {name: str(user[name] or "") for name in ("name", "email", "role", "status")}
    return await page(
        request,
        visitor,
        "people/user.html",
        title=user["name"],
        status=error.http_status if error else 200,
        user=user,
        sessions=opened,
        roles=ROLES,
        statuses=USER_STATUSES,
        values=values or shown,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


async def _members_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    account = await _account(request, visitor, "members.read")

    def read(connection: Connection) -> list[tuple[Any, bool]]:
        found = list_members(connection, account_id=account.id)
        return [(each, invitations.is_new(connection, each)) for each in found]

    found = await request.services.database.report(read, account_id=visitor.account_id)
    return await page(
        request,
        visitor,
        "people/members.html",
        lists=LISTS,
        title=f"Members of {account.name}",
        status=error.http_status if error else 200,
        account=account,
        rows=found,
        roles=MEMBER_ROLES,
        may_write=visitor.may("members.write", account.id),
        values=values or {"role": "member"},
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


async def _link_page(
    request: ApiRequest, visitor: Visitor, link: LoginLinkView, back: str
) -> Response[str]:
    settings = request.services.settings
    return await page(
        request,
        visitor,
        "people/link.html",
        title="Send this address: it is shown only once",
        status=201,
        secret=settings.console_url + link["path"],
        link=link,
        back=back,
    )


async def _account(request: ApiRequest, visitor: Visitor, act: Any) -> Account:
    named = Query(request).text("account")
    found = await request.services.database.read(lambda each: one_account(each, visitor, named))
    if not visitor.may(act, found.id):
        raise NotFound("account_not_found", f"Unknown account {named!r}.", param="account")
    return found


def _given(form: FormValues, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := form.text(name)) is not None}


HANDLERS: Final[list[Any]] = [UserPages, MemberPages]
