"""The audit log: who changed what, when and why."""

from __future__ import annotations

from typing import Any, Final, cast

from litestar import Controller, Response, get
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.request import ApiRequest
from gateway.audit_log import ACTS, Act
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.audit import AuditRow, audit_row
from gateway.console.views.files import TableFile
from gateway.console.visitors import CurrentVisitor
from gateway.operations import audit

LISTS: Final = (
    ListColumns(
        "audit",
        {
            "act": "Act",
            "of": "Of",
            "by": "By",
            "reason": "Reason",
            "changes": "Changes",
        },
    ),
)


class AuditPages(Controller):
    path = "/audit"

    @get(guards=[needs("audit.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query = Query(request)
        act = cast("Act | None", query.one_of("act", ACTS))
        span = query.span(visitor.zone)

        def read(connection: Connection) -> tuple[Account | None, list[AuditRow], str | None]:
            account = account_of(connection, visitor, query.text("account"))
            wanted = audit.read_filter(
                connection,
                account=f"id:{account.id}" if account else None,
                actor=query.text("actor"),
                act=act,
                subject=query.text("subject"),
                origin=None,
                call_id=query.text("call"),
                starts_at=span.starts_at if span else None,
                ends_at=span.ends_at if span else None,
                role=visitor.role or "operator",
            )
            found, more = audit.list_page(
                connection, wanted, limit=query.rows, cursor=query.text("cursor")
            )
            return account, [audit_row(each) for each in found], more

        account, rows, more = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        return await page(
            request,
            visitor,
            "audit.html",
            lists=LISTS,
            title=f"Audit log of {account.name}" if account else "Audit log",
            account=account,
            rows=rows,
            acts=ACTS if visitor.role is None else audit.readable_acts(visitor.role),
            as_file=TableFile(
                "audit",
                (
                    "id",
                    "at",
                    "act",
                    "subject",
                    "actor",
                    "origin",
                    "reason",
                    "call_id",
                    "refused",
                    "changes",
                ),
                rows,
                is_cut=more is not None,
            ),
            filters=query.values,
            narrowed=bool(query.narrowed - {"account"}),
            pager=query.pages(more),
        )


HANDLERS: Final[list[Any]] = [AuditPages]
