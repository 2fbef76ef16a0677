"""The caller's account: balance, webhook secret, and the key of the call."""

from __future__ import annotations

import functools
from typing import Literal, TypedDict

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.access import requested_account
from gateway.api.http.answers import json_response
from gateway.api.http.request import ApiRequest
from gateway.checks.moments import timestamp
from gateway.ledger.lots import Lot, open_lots
from gateway.ledger.transfers import owed
from gateway.operations import keys
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
