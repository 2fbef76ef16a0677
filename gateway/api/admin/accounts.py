"""Accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, get, patch, post
from litestar.params import FromPath, JSONBody

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.operations import list_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import accounts
from gateway.operations.accounts import AccountBody, AccountChange, AccountView


class AccountsController(Controller):
    path = "/v1/admin/accounts"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get(operation_id="ListAccounts", summary="List accounts with their balances")
    async def index(self, request: ApiRequest) -> Response[ListView[AccountView]]:
        return await list_response(request, accounts.list_all)

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
        operation_id="ChangeAccount",
        summary="Change an account's name, credit limit, allowance, status or time zone",
    )
    async def change(
        self,
        request: ApiRequest,
        account: FromPath[str],
        data: JSONBody[AccountChange],
    ) -> Response[AccountView]:
        return json_response(await write(request, accounts.change, account, data))
