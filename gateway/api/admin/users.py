"""Users and members of accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, patch, post, put
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.accounts.roles import Role
from gateway.accounts.users import UserStatus
from gateway.api.http.answers import ListView, PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import list_response, page_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import users
from gateway.operations.users import MemberBody, MemberView, UserBody, UserChange, UserView


class UsersController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "users"}

    @get(
        "/users",
        operation_id="ListUsers",
        summary="List users with their roles and memberships",
    )
    async def index(
        self,
        request: ApiRequest,
        role: FromQuery[Role | None] = None,
        status: FromQuery[UserStatus | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[UserView]]:
        check_limit(limit)
        return await page_response(
            request, users.list_page, role=role, status=status, limit=limit, cursor=cursor
        )

    @post(
        "/users",
        status_code=201,
        opt={"errors": [409]},
        operation_id="CreateUser",
        summary="Create a user",
    )
    async def create(self, request: ApiRequest, data: JSONBody[UserBody]) -> Response[UserView]:
        return json_response(await write(request, users.create, data), status=201)

    @patch(
        "/users/{user:str}",
        opt={"errors": [409]},
        operation_id="ChangeUser",
        summary="Change a user's name, email, role or status",
    )
    async def change(
        self, request: ApiRequest, user: FromPath[str], data: JSONBody[UserChange]
    ) -> Response[UserView]:
        return json_response(await write(request, users.change, user, data))

    @get(
        "/accounts/{account:str}/members",
        operation_id="ListMembers",
        summary="List the members of an account with their roles",
    )
    async def members(
        self, request: ApiRequest, account: FromPath[str]
    ) -> Response[ListView[MemberView]]:
        return await list_response(request, users.members_of, account)

    @put(
        "/accounts/{account:str}/members/{user:str}",
        operation_id="SetMember",
        summary="Make a user a member of an account, or change the role",
    )
    async def set_member(
        self,
        request: ApiRequest,
        account: FromPath[str],
        user: FromPath[str],
        data: JSONBody[MemberBody],
    ) -> Response[MemberView]:
        return json_response(await write(request, users.put_member, account, user, data))

    @delete(
        "/accounts/{account:str}/members/{user:str}",
        status_code=200,
        operation_id="RemoveMember",
        summary="End a user's membership of an account",
    )
    async def remove_member(
        self, request: ApiRequest, account: FromPath[str], user: FromPath[str]
    ) -> Response[MemberView]:
        return json_response(await write(request, users.end_member, account, user))
