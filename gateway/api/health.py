"""Liveness, readiness and metrics: for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from litestar import Controller, Response, get
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.api.http.answers import json_response
from gateway.api.http.guards import check_scraper
from gateway.api.http.request import ApiRequest
from gateway.billing.reconciliation import last_reconciliation
from gateway.catalog.availability import availability
from gateway.metrics import RECONCILE_FINDINGS, RECONCILED_AT, exposition
from gateway.sql.outages import SQL_OUTAGE


class LiveView(TypedDict):
    status: Literal["live", "not live", "ending"]
    late_loops: NotRequired[dict[str, float]]
    reason: NotRequired[str]


class ReadyView(TypedDict):
    status: Literal["ready", "not ready"]
    checks: Mapping[str, bool]
    models_served: int
    set_aside: int


class HealthController(Controller):
    tags = ["Operation"]

    @get(
        "/health/live",
        operation_id="GetLiveness",
        summary="Liveness: every background loop has reported in time",
        opt={"errors": [503]},
        security=[],
    )
    async def live(self, request: ApiRequest) -> Response[LiveView]:
        supervisor = request.services.supervisor
        late = supervisor.late()
        body: LiveView = {"status": "live"}
        if late:
            body = {"status": "not live", "late_loops": late}
        if supervisor.failed is not None:
            body = {"status": "ending", "reason": supervisor.failed, "late_loops": late}
        return json_response(body, status=200 if body["status"] == "live" else 503)

    @get(
        "/health/ready",
        opt={"errors": [503]},
        operation_id="GetReadiness",
        summary="Readiness: SQL accepts a write, the queue responds, and the disks have room",
        security=[],
    )
    async def ready(self, request: ApiRequest) -> Response[ReadyView]:
        checks = await request.services.readiness.checks()
        ready = all(checks.values())
        announced = request.services.requests.health.announcements
        served = [
            entry
            for entry in request.services.live.entries()
            if availability(entry, announced) is None
        ]
        return json_response(
            {
                "status": "ready" if ready else "not ready",
                "checks": checks,
                "models_served": len(served),
                "set_aside": sum(request.services.readiness.set_aside.values()),
            },
            status=200 if ready else 503,
        )

    @get(
        "/metrics",
        opt={
            "media": ["text/plain"],
            "errors": [401, 403, 404],
            "security": [{}, {"key": []}],
        },
        operation_id="GetMetrics",
        summary="Prometheus metrics",
        description="Requires a key with the scope `admin` or the token in "
        "`TOLLGATE_METRICS_TOKEN`, unless the operator opened the metrics to every caller or "
        "turned them off.",
    )
    async def metrics(self, request: ApiRequest) -> Response[bytes]:
        await check_scraper(request, request.services.settings)
        request.services.requests.observe()
        await request.services.readiness.checks()
        with contextlib.suppress(*SQL_OUTAGE):
            found = await request.services.database.read(last_reconciliation)
            if found is not None:
                RECONCILED_AT.set(found.finished_at.timestamp())
                RECONCILE_FINDINGS.set(len(found.findings))
        return Response(exposition(), media_type=CONTENT_TYPE_LATEST)
