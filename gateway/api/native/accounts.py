"""The caller's account: what it is, who sees its contents, balance, webhook secret, and the key of
the call."""

from __future__ import annotations

import functools
from typing import Literal, TypedDict

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromQuery, JSONBody
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.api.http.operations import list_response, write
from gateway.api.http.request import ApiRequest
from gateway.checks.moments import timestamp
from gateway.ledger.lots import Lot, open_lots
from gateway.ledger.transfers import owed
from gateway.operations import accounts, keys
from gateway.operations.accounts import AccountView, OwnAccountChange
from gateway.operations.entrance import content_grants
from gateway.operations.entrance.content_grants import ContentGrantView, GrantBody
from gateway.operations.keys import KeyView
from gateway.pricing import format_usd
from gateway.webhooks.sender import signing_secret


class LotView(TypedDict):
    """One credit and what is left of it."""

    kind: str
    amount: str
    remaining: str
    expires_at: str | None


class BalanceView(TypedDict):
    currency: Literal["USD"]
    posted: str
    held: str
    available: str
    credit_limit: str
    allowance: str
    owed: str
    status: str
    lots: list[LotView]


class WebhookSecretView(TypedDict):
    object: Literal["webhook.secret"]
    secret: str


class AccountController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get("/account", operation_id="GetOwnAccount", summary="The account of the call's key")
    async def own(self, request: ApiRequest) -> Response[AccountView]:
        show = functools.partial(accounts.show, account=f"id:{request.key.account_id}")
        return json_response(await request.services.database.read(show))

    @patch(
        "/account",
        opt={"scope": "inference", "least": "owner", "members_only": True},
        operation_id="ChangeOwnAccount",
        summary="Decide whether inputs are kept as long as outputs; for owners",
    )
    async def change(
        self, request: ApiRequest, data: JSONBody[OwnAccountChange]
    ) -> Response[AccountView]:
        account_id = request.key.account_id
        return json_response(await write(request, accounts.change_own, account_id, data))

    @get(
        "/content-grants",
        operation_id="ListContentGrants",
        summary="List when operators could see prompts and outputs, newest first",
    )
    async def grants(self, request: ApiRequest) -> Response[ListView[ContentGrantView]]:
        return await list_response(request, content_grants.list_grants, request.key.account_id)

    @post(
        "/content-grants",
        status_code=201,
        opt={"scope": "inference", "least": "owner", "members_only": True},
        operation_id="GrantContents",
        summary="Let operators see prompts and outputs for 1, 8 or 24 hours; for owners",
    )
    async def grant(
        self, request: ApiRequest, data: JSONBody[GrantBody]
    ) -> Response[ContentGrantView]:
        account_id = request.key.account_id
        made = await write(request, content_grants.grant, account_id, data)
        return json_response(made, status=201)

    @delete(
        "/content-grants",
        status_code=200,
        opt={"scope": "inference", "least": "owner", "members_only": True, "errors": [404]},
        operation_id="EndContentGrant",
        summary="End the sight that operators have now; for owners",
    )
    async def end_grant(self, request: ApiRequest) -> Response[ContentGrantView]:
        account_id = request.key.account_id
        return json_response(await write(request, content_grants.end_grant, account_id))

    @get("/balance", operation_id="GetBalance", summary="Balance and holds of the account")
    async def balance(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[BalanceView]:

        def read(connection: Connection) -> tuple[Account, list[Lot], int]:
            owner = requested_account(request, connection, account, "accounts")
            return owner, open_lots(connection, owner.id), owed(connection, owner.id)

        found, lots, debt = await request.services.database.read(read)
        return json_response(
            {
                "currency": "USD",
                "posted": format_usd(found.posted_nanos),
                "held": format_usd(found.held_nanos),
                "available": format_usd(found.available_nanos),
                "credit_limit": format_usd(found.credit_limit_nanos),
                "allowance": format_usd(found.allowance_nanos),
                "owed": format_usd(debt),
                "status": found.status,
                "lots": [
                    {
                        "kind": lot.kind,
                        "amount": format_usd(lot.amount_nanos),
                        "remaining": format_usd(lot.remaining_nanos),
                        "expires_at": timestamp(lot.expires_at) if lot.expires_at else None,
                    }
                    for lot in lots
                ],
            }
        )

    @get(
        "/webhook-secret",
        opt={"least": "owner"},
        operation_id="GetWebhookSecret",
        summary="Signing secret of the account's webhooks (Standard Webhooks)",
    )
    async def webhook_secret(self, request: ApiRequest) -> Response[WebhookSecretView]:
        secret = signing_secret(request.services.pepper, request.key.account_id)
        return json_response({"object": "webhook.secret", "secret": secret})

    @get("/keys/self", operation_id="GetOwnKey", summary="Get the key of this call")
    async def own_key(self, request: ApiRequest) -> Response[KeyView]:
        show = functools.partial(keys.show, key_id=request.key.id)
        return json_response(await request.services.database.read(show))
