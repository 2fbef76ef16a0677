"""Accounts, keys and their credit, as an administrator keeps them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import (
    Account,
    AccountExists,
    change_account,
    create_account,
    list_accounts,
)
from gateway.accounts.keys import create_key, list_keys, revoke_key
from gateway.api.http.access import caller, requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.api.http.fields import Moment, PerMinute, UsdAmount
from gateway.api.native.views import KeyView, key_view
from gateway.billing.corrections import Correction, plan
from gateway.billing.corrections import post as post_corrections
from gateway.billing.credits import enter_chargeback, enter_credit
from gateway.catalog.price_overrides import InvalidPriceOverride, read_price_override
from gateway.catalog.store import LiveCatalog
from gateway.checks.moments import timestamp
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.ledger.refunds import NotRefundable, refund
from gateway.ledger.transfers import Transfer, TransferConflict
from gateway.pricing import format_usd
from gateway.sql.database import Database

T = TypeVar("T")

Reason = Annotated[str, Field(min_length=1, max_length=500)]
Reference = Annotated[str, Field(min_length=1, max_length=120)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class AdminBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AccountBody(AdminBody):
    name: Name
    credit_limit: UsdAmount = 0


class AccountChange(AdminBody):
    credit_limit: UsdAmount | None = None
    allowance: UsdAmount | None = None
    status: Literal["active", "suspended", "closed"] | None = None
    report_tz: str | None = None
    name: Name | None = None


class CreditBody(AdminBody):
    kind: Literal["topup", "grant"]
    amount: UsdAmount
    reference: Reference
    reason: Reason
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None
    expires_at: Moment | None = None


class ChargebackBody(AdminBody):
    amount: UsdAmount
    reference: Reference
    reason: Reason


class RefundBody(AdminBody):
    amount: UsdAmount | None = None
    reason: Reason
    reference: Reference | None = None


class CorrectionBody(AdminBody):
    model: Name
    account: str | None = None
    starts_at: Annotated[Moment, Field(alias="from")]
    ends_at: Annotated[Moment, Field(alias="to")]
    price: list[dict[str, Any]]
    minimum: str | None = None
    reference: Reference
    reason: Reason
    dry_run: bool = True


class KeyBody(AdminBody):
    name: Annotated[str, Field(max_length=200)] = ""
    scopes: Annotated[tuple[Literal["inference", "read", "admin"], ...], Field(min_length=1)] = (
        "inference",
        "read",
    )
    expires_at: Moment | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    spend_limit: UsdAmount | None = None


class AccountView(TypedDict):
    object: Literal["account"]
    id: int
    name: str
    status: str
    posted: str
    held: str
    available: str
    credit_limit: str
    allowance: str
    report_tz: str
    created_at: str


class TransferView(TypedDict):
    """A booked movement; ``repeated`` if its reference had been booked before."""

    object: Literal["transfer"]
    id: int
    amount: str
    balance_after: str
    booked_at: str
    repeated: bool


class CorrectionView(TypedDict):
    request_id: str
    account_id: int
    paid: str
    due: str
    back: str


class CorrectionsView(TypedDict):
    """Charges that a price corrects; ``data`` has the first thousand."""

    object: Literal["correction"]
    dry_run: bool
    requests: int
    total: str
    booked: str
    data: list[CorrectionView]


class NewKeyView(KeyView):
    """A key with its secret, which is not shown again."""

    secret: str


class CreditController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get("/accounts", operation_id="ListAccounts", summary="All accounts with their balances")
    async def accounts(self, request: Request[Any, Any, Any]) -> Response[ListView[AccountView]]:
        database: Database = request.app.state.database
        found = await database.report(list_accounts, account_id=caller(request).account_id)
        return json_response({"object": "list", "data": [account_view(each) for each in found]})

    @post(
        "/accounts",
        status_code=201,
        opt={"errors": [409]},
        operation_id="CreateAccount",
        summary="Open an account",
    )
    async def create(
        self, request: Request[Any, Any, Any], data: JSONBody[AccountBody]
    ) -> Response[AccountView]:
        made = await _write(
            request,
            lambda connection: create_account(
                connection, data.name, credit_limit_nanos=data.credit_limit
            ),
        )
        return json_response(account_view(made), status=201)

    @patch(
        "/accounts/{account:str}",
        operation_id="ChangeAccount",
        summary="Change name, limit, allowance, status or time zone",
    )
    async def change(
        self,
        request: Request[Any, Any, Any],
        account: FromPath[str],
        data: JSONBody[AccountChange],
    ) -> Response[AccountView]:
        changed = await _write(
            request,
            lambda connection: change_account(
                connection,
                requested_account(request, connection, account).id,
                credit_limit_nanos=data.credit_limit,
                allowance_nanos=data.allowance,
                status=data.status,
                report_tz=data.report_tz,
                name=data.name,
            ),
        )
        return json_response(account_view(changed))

    @post(
        "/accounts/{account:str}/credit",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="AddCredit",
        summary="Book a top-up or a grant, once per reference",
    )
    async def credit(
        self, request: Request[Any, Any, Any], account: FromPath[str], data: JSONBody[CreditBody]
    ) -> Response[TransferView]:
        made = await _write(
            request,
            lambda connection: enter_credit(
                connection,
                requested_account(request, connection, account).id,
                data.amount,
                kind=data.kind,
                reference=data.reference,
                actor=caller(request).prefix,
                reason=data.reason,
                priority=data.priority,
                expires_at=data.expires_at,
            ),
        )
        return json_response(transfer_view(made), status=200 if made.repeated else 201)

    @post(
        "/accounts/{account:str}/chargebacks",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="ChargeBack",
        summary="Take a payment back; what is spent already is owed",
    )
    async def charge_back(
        self,
        request: Request[Any, Any, Any],
        account: FromPath[str],
        data: JSONBody[ChargebackBody],
    ) -> Response[TransferView]:
        made = await _write(
            request,
            lambda connection: enter_chargeback(
                connection,
                requested_account(request, connection, account).id,
                data.amount,
                reference=data.reference,
                actor=caller(request).prefix,
                reason=data.reason,
            ),
        )
        return json_response(transfer_view(made), status=200 if made.repeated else 201)

    @post(
        "/requests/{request_id:str}/refund",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="RefundRequest",
        summary="Give a charge back, in whole or in part",
    )
    async def refund(
        self,
        request: Request[Any, Any, Any],
        request_id: FromPath[str],
        data: JSONBody[RefundBody],
    ) -> Response[TransferView]:
        name = data.reference or secrets.token_hex(12)
        made = await _write(
            request,
            lambda connection: refund(
                connection,
                request_id,
                data.amount,
                key=f"refund:{request_id}:{name}",
                actor=caller(request).prefix,
                reason=data.reason,
            ),
        )
        return json_response(transfer_view(made), status=200 if made.repeated else 201)

    @post(
        "/corrections",
        status_code=200,
        opt={"errors": [409]},
        operation_id="CorrectPrice",
        summary="Give back what a wrong price took; a dry run unless told otherwise",
    )
    async def correct(
        self, request: Request[Any, Any, Any], data: JSONBody[CorrectionBody]
    ) -> Response[CorrectionsView]:
        live: LiveCatalog = request.app.state.live
        entry = live.entry(data.model)
        if entry is None:
            raise NotFound("model_not_found", f"The model {data.model!r} does not exist.")
        told: dict[str, Any] = {"price": data.price}
        if data.minimum is not None:
            told["minimum"] = data.minimum
        try:
            price = read_price_override(entry, told)
        except InvalidPriceOverride as error:
            raise InvalidRequest("invalid_price", f"{error}.", param="price") from None

        def work(connection: Connection) -> tuple[list[Correction], int]:
            owner = requested_account(request, connection, data.account) if data.account else None
            found = plan(
                connection,
                data.model,
                price,
                starts_at=data.starts_at,
                ends_at=data.ends_at,
                account_id=owner.id if owner else None,
            )
            if data.dry_run:
                return found, 0
            return found, post_corrections(
                connection,
                found,
                reference=data.reference,
                actor=caller(request).prefix,
                reason=data.reason,
            )

        found, booked = await _write(request, work, slow=True)
        return json_response(
            {
                "object": "correction",
                "dry_run": data.dry_run,
                "requests": len(found),
                "total": format_usd(sum(each.back_nanos for each in found)),
                "booked": format_usd(booked),
                "data": [correction_view(each) for each in found[:1000]],
            }
        )

    @get("/keys", operation_id="ListKeys", summary="Keys, of one account or of all")
    async def keys(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[ListView[KeyView]]:
        database: Database = request.app.state.database

        def read(connection: Connection) -> list[KeyView]:
            owner = requested_account(request, connection, account).id if account else None
            return [key_view(key) for key in list_keys(connection, owner)]

        return json_response(
            {
                "object": "list",
                "data": await database.report(read, account_id=caller(request).account_id),
            }
        )

    @post(
        "/accounts/{account:str}/keys",
        status_code=201,
        operation_id="CreateKey",
        summary="Make a key; its secret is shown this once",
    )
    async def create_key(
        self, request: Request[Any, Any, Any], account: FromPath[str], data: JSONBody[KeyBody]
    ) -> Response[NewKeyView]:
        secret, made = await _write(
            request,
            lambda connection: create_key(
                connection,
                requested_account(request, connection, account).id,
                pepper=request.app.state.pepper,
                name=data.name,
                scopes=data.scopes,
                expires_at=data.expires_at,
                requests_per_minute=data.requests_per_minute,
                tokens_per_minute=data.tokens_per_minute,
                spend_limit_nanos=data.spend_limit,
            ),
        )
        return json_response({**key_view(made), "secret": secret}, status=201)

    @delete(
        "/keys/{key:str}",
        status_code=200,
        operation_id="RevokeKey",
        summary="Revoke a key, at once and in every gateway",
    )
    async def revoke(
        self, request: Request[Any, Any, Any], key: FromPath[str]
    ) -> Response[KeyView]:
        return json_response(
            key_view(await _write(request, lambda connection: revoke_key(connection, key)))
        )


async def _write(
    request: Request[Any, Any, Any], work: Callable[[Connection], T], *, slow: bool = False
) -> T:
    """Run a transaction; turn what its caller can mend into an answer."""
    database: Database = request.app.state.database
    try:
        return await (database.slow_write(work) if slow else database.write(work))
    except AccountExists as error:
        raise Conflict("account_exists", f"{error}.", param="name") from None
    except TransferConflict as error:
        raise Conflict("reference_conflict", f"{error}.", param="reference") from None
    except NotRefundable as error:
        raise InvalidRequest("not_refundable", f"{error}.", param="amount") from None
    except LookupError as error:
        raise NotFound("not_found", f"{error.args[0]}.") from None
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"{error}.") from None


def account_view(account: Account) -> AccountView:
    return {
        "object": "account",
        "id": account.id,
        "name": account.name,
        "status": account.status,
        "posted": format_usd(account.posted_nanos),
        "held": format_usd(account.held_nanos),
        "available": format_usd(account.available_nanos),
        "credit_limit": format_usd(account.credit_limit_nanos),
        "allowance": format_usd(account.allowance_nanos),
        "report_tz": account.report_tz,
        "created_at": timestamp(account.created_at),
    }


def transfer_view(made: Transfer) -> TransferView:
    return {
        "object": "transfer",
        "id": made.id,
        "amount": format_usd(made.amount_nanos),
        "balance_after": format_usd(made.posted_after),
        "booked_at": timestamp(made.booked_at),
        "repeated": made.repeated,
    }


def correction_view(each: Correction) -> CorrectionView:
    return {
        "request_id": each.request_id,
        "account_id": each.account_id,
        "paid": format_usd(each.paid_nanos),
        "due": format_usd(each.due_nanos),
        "back": format_usd(each.back_nanos),
    }
