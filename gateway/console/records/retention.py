"""Retention: what is kept for how long, what is due, and clearing it now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar import Controller, Response, get, post
from sqlalchemy import Connection

from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor
from gateway.errors import InvalidRequest
from gateway.operations.retention import record_run
from gateway.retention.aged import COUNTED_MAX
from gateway.retention.clearing import Retention, State
from gateway.retention.kinds import all_kinds

KIND: Final = "retention.run"
LATE: Final = timedelta(minutes=5)
"""Gateways clear each minute; what has been due for longer is shown as late."""
LISTS: Final = (
    ListColumns(
        "retention",
        {
            "kept": "Kept",
            "setting": "Setting",
            "due": "Next to go",
            "would_go": "Would go now",
            "cleared": "Cleared so far",
            "last": "Last cleared",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class KindRow:
    """A kind of rows. ``due_at``: since or from when its oldest row is due."""

    name: str
    setting: str
    kept: timedelta | None
    due_at: datetime | None
    is_due: bool
    is_late: bool
    due: int | None
    """Rows that the next run would clear, at most ``COUNTED_MAX``; None if they are not counted."""
    cleared: int
    cleared_at: datetime | None


class RetentionPages(Controller):
    path = "/retention"

    @get(guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        retention = _retention(request)

        now = datetime.now(UTC)

        def read(connection: Connection) -> tuple[list[KindRow], ConsoleJob | None]:
            due = retention.count_due(connection, now)
            rows = [
                _row(each, now, due.get(each.kind.name)) for each in retention.measure(connection)
            ]
            return rows, find_latest(connection, KIND, digest_of())

        rows, job = await request.services.database.report(read, account_id=None)
        return await page(
            request,
            visitor,
            "records/retention.html",
            lists=LISTS,
            title=_title(rows),
            rows=rows,
            counted_max=COUNTED_MAX,
            job=job,
            may_write=visitor.may("retention.write"),
        )

    @post(guards=[needs("retention.write")])
    async def run(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Clear now what is due."""
        form, database, retention = (
            await read_form(request),
            request.services.database,
            _retention(request),
        )
        author = visitor.author(form.text("reason") or "")

        async def work(_: Progress) -> dict[str, int]:
            cleared = await retention.clear_due()
            if cleared is None:
                raise InvalidRequest("invalid_value", "Another process is clearing already.")
            await database.write(lambda connection: record_run(connection, author, cleared))
            return dict(cleared)

        job = NewJob(
            kind=KIND,
            digest=digest_of(),
            starter=author.name,
            act="installation.read",
            back="/console/retention",
            can_cancel=False,
        )
        await start_job(request, job, work)
        return see_other("/console/retention")


def _retention(request: ApiRequest) -> Retention:
    services = request.services
    return Retention(
        services.database, all_kinds(services.settings, services.database, services.blobs)
    )


def _row(state: State, now: datetime, due: int | None) -> KindRow:
    lag = state.lag(now)
    return KindRow(
        name=state.kind.name,
        setting=state.kind.setting,
        kept=state.kind.kept,
        due_at=state.due_at,
        is_due=state.due_at is not None and state.due_at <= now,
        is_late=lag > LATE,
        due=due,
        cleared=state.cleared,
        cleared_at=state.cleared_at,
    )


def _title(rows: list[KindRow]) -> str:
    late = sum(row.is_late for row in rows)
    if late:
        return f"Clearing is behind for {late} kind{'' if late == 1 else 's'}"
    return "What is kept, and for how long"


HANDLERS: Final[list[Any]] = [RetentionPages]
