"""What an operator asks of a running gateway. Accounts, keys and credit are the command line's."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from litestar import Controller, Request, Response, get, post

from gateway.api.http.access import caller
from gateway.api.http.answers import json_response
from gateway.billing.audit import Reconciliation, last_audit, run_audit
from gateway.catalog.store import LiveCatalog
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.ledger.reconcile import Finding
from gateway.sql.database import Database


class ReloadedView(TypedDict):
    object: Literal["catalog"]
    models: int


class ReconciliationView(TypedDict):
    """Result of a proof of the books."""

    object: Literal["reconciliation"]
    agrees: bool
    findings: list[Finding]
    started_at: str
    finished_at: str


class AdminController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @post(
        "/catalog/reload",
        status_code=200,
        operation_id="ReloadCatalog",
        summary="Read catalog.yaml again; a changed price is a new price version",
    )
    async def reload(self, request: Request[Any, Any, Any]) -> Response[ReloadedView]:
        live: LiveCatalog = request.app.state.live
        problems = await live.reload()
        if problems:
            raise InvalidRequest(
                "invalid_catalog",
                f"The catalog was not changed: {problems[0]}"
                + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
                details={"problems": [str(problem) for problem in problems]},
            )
        return json_response({"object": "catalog", "models": len(live.names())})

    @post(
        "/reconcile",
        status_code=200,
        operation_id="Reconcile",
        summary="Prove now that the books agree, or say what differs",
    )
    async def reconcile(self, request: Request[Any, Any, Any]) -> Response[ReconciliationView]:
        state = request.app.state
        return json_response(_view(await run_audit(state.database, state.payment_provider)))

    @get(
        "/reconcile",
        operation_id="GetReconciliation",
        summary="What the last proof found, by whichever gateway",
    )
    async def last(self, request: Request[Any, Any, Any]) -> Response[ReconciliationView]:
        database: Database = request.app.state.database
        found = await database.report(last_audit, account_id=caller(request).account_id)
        if found is None:
            raise NotFound("not_reconciled", "The books have not been reconciled yet.")
        return json_response(_view(found))


def _view(found: Reconciliation) -> ReconciliationView:
    return {
        "object": "reconciliation",
        "agrees": not found.findings,
        "findings": list(found.findings),
        "started_at": timestamp(found.started_at),
        "finished_at": timestamp(found.finished_at),
    }
