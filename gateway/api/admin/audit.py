"""The audit log over HTTP."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Final

from litestar import Controller, Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter
from litestar.response import Stream

from gateway.api.http.answers import PageView
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import moment_in_query
from gateway.api.http.operations import export_pages, page_response
from gateway.api.http.request import ApiRequest
from gateway.audit_log import Act, AuditFilter, Origin
from gateway.operations import audit
from gateway.operations.audit import AuditEventView, Format

MEDIA_TYPES: Final = {"jsonl": "application/jsonl", "csv": "text/csv"}
_MOMENT: Final = {"format": "date-time", "examples": ["2026-03-01T10:00:00Z"]}


async def read_audit_filter(
    request: ApiRequest,
    account: FromQuery[str | None] = None,
    actor: FromQuery[str | None] = None,
    act: FromQuery[Act | None] = None,
    subject: FromQuery[str | None] = None,
    origin: FromQuery[Origin | None] = None,
    call_id: FromQuery[str | None] = None,
    first: Annotated[str | None, QueryParameter(name="from", schema_extra=_MOMENT)] = None,
    last: Annotated[str | None, QueryParameter(name="to", schema_extra=_MOMENT)] = None,
) -> AuditFilter:
    """Litestar dependency: the events that are wanted; ``from`` is included, ``to`` is not."""
    read = functools.partial(
        audit.read_filter,
        account=account,
        actor=actor,
        act=act,
        subject=subject,
        origin=origin,
        call_id=call_id,
        starts_at=moment_in_query(first, "from"),
        ends_at=moment_in_query(last, "to"),
        role=request.key.role or "operator",
    )
    return await request.services.database.read(read)


class AuditController(Controller):
    path = "/v1/admin/audit"
    dependencies = {"wanted": Provide(read_audit_filter)}
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "audit"}

    @get(
        operation_id="ListAuditEvents",
        summary="List administrative acts with their authors, newest first",
    )
    async def index(
        self,
        request: ApiRequest,
        wanted: NamedDependency[AuditFilter],
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[AuditEventView]]:
        check_limit(limit)
        return await page_response(
            request, audit.list_page, wanted=wanted, limit=limit, cursor=cursor
        )

    @get(
        "/export",
        opt={"media": list(MEDIA_TYPES.values())},
        operation_id="ExportAuditEvents",
        summary="Administrative acts as JSON lines or CSV, oldest first",
    )
    async def export(
        self,
        request: ApiRequest,
        wanted: NamedDependency[AuditFilter],
        format: FromQuery[Format] = "jsonl",
    ) -> Stream:
        # It ends, even if new events are recorded faster than they are read.
        now = datetime.now(UTC)
        wanted = replace(wanted, ends_at=min(wanted.ends_at or now, now))
        return Stream(
            export_pages(request, audit.export_page, wanted=wanted, format=format),
            media_type=MEDIA_TYPES[format],
            headers={"Content-Disposition": f'attachment; filename="audit.{format}"'},
        )
