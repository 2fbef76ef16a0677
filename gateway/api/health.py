"""Liveness, readiness and metrics: for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, get
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.api.answers import json_response
from gateway.catalog.availability import availability
from gateway.catalog.store import LiveCatalog
from gateway.metrics import REGISTRY
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
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
