"""Credit, chargebacks, refunds and corrections over HTTP."""

from __future__ import annotations

from typing import Final

from litestar import Controller, Response, post
from litestar.params import FromPath, JSONBody
from sqlalchemy import Connection

from gateway.api.http.answers import json_response
from gateway.api.http.operations import author_of, write
from gateway.api.http.request import ApiRequest
from gateway.errors import unknown_model
from gateway.operations import credit, prices
from gateway.operations.credit import (
    ChargebackBody,
    CorrectionBody,
    CorrectionsView,
    CreditBody,
    RefundBody,
    TransferView,
)

CORRECTIONS_MAX: Final = 1000
"""Maximum number of corrected requests in a response."""


class CreditController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "credit"}

    @post(
        "/accounts/{account:str}/credit",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="AddCredit",
        summary="Book a top-up or a grant, once per reference",
    )
    async def credit(
        self, request: ApiRequest, account: FromPath[str], data: JSONBody[CreditBody]
    ) -> Response[TransferView]:
        return _booked(await write(request, credit.add, account, data))

    @post(
        "/accounts/{account:str}/chargebacks",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="ChargeBack",
        summary="Reverse a payment; what is already spent becomes a debt",
    )
    async def charge_back(
        self,
        request: ApiRequest,
        account: FromPath[str],
        data: JSONBody[ChargebackBody],
    ) -> Response[TransferView]:
        return _booked(await write(request, credit.charge_back, account, data))

    @post(
        "/requests/{request_id:str}/refund",
        status_code=201,
        opt={"answers": [200], "errors": [409]},
        operation_id="RefundRequest",
        summary="Refund a charge, in full or in part",
    )
    async def refund(
        self,
        request: ApiRequest,
        request_id: FromPath[str],
        data: JSONBody[RefundBody],
    ) -> Response[TransferView]:
        services = request.services
        archived = await credit.archived_charge(services.database, services.blobs, request_id)
        return _booked(await write(request, credit.refund, request_id, data, archived))

    @post(
        "/corrections",
        status_code=200,
        opt={"errors": [409]},
        operation_id="CorrectPrice",
        summary="Refund what a wrong price took; a dry run unless dry_run is false",
    )
    async def correct(
        self, request: ApiRequest, data: JSONBody[CorrectionBody]
    ) -> Response[CorrectionsView]:
        entry = request.services.live.entry(data.model)
        if entry is None:
            raise unknown_model(data.model)
        author, services = author_of(request), request.services
        price = prices.read(entry, data.price, data.minimum)
        archived = await credit.archived_corrections(
            services.database,
            services.blobs,
            data.model,
            price,
            starts_at=data.starts_at,
            ends_at=data.ends_at,
            account=data.account,
            dry_run=data.dry_run,
        )

        def correct(connection: Connection) -> CorrectionsView:
            return credit.correct(
                connection,
                author,
                data.model,
                price,
                starts_at=data.starts_at,
                ends_at=data.ends_at,
                account=data.account,
                reference=data.reference,
                reason=data.reason,
                dry_run=data.dry_run,
                archived=archived,
            )

        made = await services.database.slow_write(correct)
        return json_response({**made, "data": made["data"][:CORRECTIONS_MAX]})


def _booked(made: TransferView) -> Response[TransferView]:
    return json_response(made, status=200 if made["repeated"] else 201)
