"""Maintenance of a running gateway: reconcile its ledger."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import QueryParameter

from gateway.api.http.answers import json_response
from gateway.api.http.operations import author_of
from gateway.api.http.request import ApiRequest
from gateway.billing.reconciliation import Reconciliation, last_reconciliation, run_reconciliation
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.ledger.reconcile import Finding


class ReconciliationView(TypedDict):
    """Result of a reconciliation."""

    object: Literal["reconciliation"]
    agrees: bool
    findings: list[Finding]
    started_at: str
    finished_at: str


class AdminController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "ledger"}

    @post(
        "/reconcile",
        status_code=200,
        operation_id="Reconcile",
        summary="Reconcile the ledger now and return what differs",
    )
    async def reconcile(
        self,
        request: ApiRequest,
        whole: Annotated[
            bool,
            QueryParameter(name="all", description="Read everything, also months that are proven."),
        ] = False,
    ) -> Response[ReconciliationView]:
        database, provider = request.services.database, request.services.payment_provider
        found = await run_reconciliation(database, provider, author=author_of(request), whole=whole)
        return json_response(_view(found))

    @get(
        "/reconcile",
        operation_id="GetReconciliation",
        summary="Return the result of the last reconciliation, by any gateway",
    )
    async def last(self, request: ApiRequest) -> Response[ReconciliationView]:
        database = request.services.database
        found = await database.report(last_reconciliation, account_id=request.key.account_id)
        if found is None:
            raise NotFound("not_reconciled", "The ledger has not been reconciled yet.")
        return json_response(_view(found))


def _view(found: Reconciliation) -> ReconciliationView:
    return {
        "object": "reconciliation",
        "agrees": not found.findings,
        "findings": list(found.findings),
        "started_at": timestamp(found.started_at),
        "finished_at": timestamp(found.finished_at),
    }
