"""Accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.accounts.accounts import Status
from gateway.accounts.roles import check_role
from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import accounts
from gateway.operations.accounts import AccountBody, AccountChange, AccountView


class AccountsController(Controller):
    path = "/v1/admin/accounts"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "accounts"}

    @get(
        operation_id="ListAccounts",
        summary="List accounts with their balances, by status and by the start of their name",
    )
    async def index(
        self,
        request: ApiRequest,
        status: FromQuery[Status | None] = None,
        name: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[AccountView]]:
        check_limit(limit)
        return await page_response(
            request, accounts.list_page, status=status, name=name, limit=limit, cursor=cursor
        )

    @post(
        status_code=201,
        opt={"errors": [409]},
        operation_id="CreateAccount",
        summary="Open an account",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[AccountBody]
    ) -> Response[AccountView]:
        return json_response(await write(request, accounts.create, data), status=201)

    @patch(
        "/{account:str}",
        opt={"area": "terms"},
        operation_id="ChangeAccount",
        summary="Change an account's name, credit limit, allowance, status or time zone",
    )
    async def change(
        self,
        request: ApiRequest,
        account: FromPath[str],
        data: JSONBody[AccountChange],
    ) -> Response[AccountView]:
        if data.model_fields_set - accounts.TERMS:
            check_role(request.key.role or "operator", "accounts", write=True)
        return json_response(await write(request, accounts.change, account, data))
