"""Liveness, readiness and metrics: for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

import contextlib
from typing import Any

from litestar import Controller, Request, Response, get
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.api.answers import json_response
from gateway.billing.audit import last_audit
from gateway.catalog.availability import availability
from gateway.catalog.store import LiveCatalog
from gateway.metrics import RECONCILE_FINDINGS, RECONCILED_AT, REGISTRY
from gateway.requests.lifecycle import Requests


class HealthController(Controller):
    tags = ["Operation"]

    @get("/health/live", operation_id="GetLiveness", summary="The process runs", security=[])
    async def live(self) -> dict[str, str]:
        return {"status": "live"}

    @get(
        "/health/ready",
        operation_id="GetReadiness",
        summary="The gateway can take requests: database and queue answer",
        security=[],
    )
    async def ready(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        requests: Requests = request.app.state.requests
        checks = {"database": True, "queue": requests.watch.healthy}
        try:
            await request.app.state.database.read(
                lambda connection: connection.execute(text("SELECT 1"))
            )
        except DBAPIError:
            checks["database"] = False
        ready = all(checks.values())
        live: LiveCatalog = request.app.state.live
        announced = requests.watch.announcements
        served = [entry for entry in live.entries() if availability(entry, announced) is None]
        return json_response(
            {
                "status": "ready" if ready else "not ready",
                "checks": checks,
                "models_served": len(served),
            },
            status=200 if ready else 503,
        )

    @get("/metrics", operation_id="GetMetrics", summary="Prometheus metrics", security=[])
    async def metrics(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        requests: Requests = request.app.state.requests
        requests.observe()
        with contextlib.suppress(DBAPIError):
            found = await request.app.state.database.read(last_audit)
            if found is not None:
                RECONCILED_AT.set(found.finished_at.timestamp())
                RECONCILE_FINDINGS.set(len(found.findings))
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
