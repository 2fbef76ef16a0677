"""Archives: closed months as files; archived, verified and restored as jobs with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.api.http.request import ApiRequest
from gateway.api.native.statements import read_month
from gateway.billing.statements.close import BillingPeriod, list_periods
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress, Work
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import FormValues, read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound
from gateway.operations import periods
from gateway.operations.periods import ArchiveView
from gateway.operations.refusals import refusals

KINDS: Final = ("archive.write", "archive.verify", "archive.restore")
FINISHED: Final = ("verified", "removed")
LISTS: Final = (
    ListColumns(
        "archives",
        {
            "where": "Where",
            "receipts": "Receipts",
            "kept": "Still in the database",
            "size": "Size",
            "since": "Since",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Month:
    period: BillingPeriod
    archive: ArchiveView | None
    jobs: Sequence[ConsoleJob]
    """The latest job of each kind, newest first."""

    @property
    def running(self) -> ConsoleJob | None:
        return next((each for each in self.jobs if each.is_running), None)


class ArchivePages(Controller):
    path = "/archives"

    @get(guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        def read(connection: Connection) -> tuple[list[BillingPeriod], list[ArchiveView]]:
            return list_periods(connection), periods.list_archived(connection)

        found, archived = await request.services.database.report(read, account_id=None)
        by_month = {each["month"]: each for each in archived}
        return await page(
            request,
            visitor,
            "records/archives.html",
            lists=LISTS,
            title=_title(archived),
            rows=[(each, by_month.get(each.month)) for each in reversed(found)],
            finished=FINISHED,
            bytes_total=sum(each["bytes"] or 0 for each in archived),
        )

    @get("/{month:str}", guards=[needs("installation.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[str]:
        name, services = read_month(month, ())[0], request.services
        found = await services.database.report(
            lambda connection: _month(connection, name), account_id=None
        )
        if found is None:
            raise NotFound("not_found", f"Nothing was booked in {name}.")
        obstacle = None
        if found.archive is None and found.period.state == "closed":
            # Imported late: it takes a while, and a gateway should start quickly.
            from gateway.archive.obstacle import obstacle as obstacle_of

            expires = services.settings.metadata_retention_days is not None
            obstacle = await services.database.report(
                lambda connection: obstacle_of(connection, name, metadata_expires=expires),
                account_id=None,
            )
        return await page(
            request,
            visitor,
            "records/archive.html",
            title=_month_title(found),
            found=found,
            archive=found.archive,
            period=found.period,
            obstacle=obstacle,
            finished=FINISHED,
            may_write=visitor.may("periods.write"),
        )

    @post("/{month:str}", guards=[needs("periods.write")])
    async def act(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[Any]:
        """Archive a month, verify its archive, or restore it."""
        (name, _), form = read_month(month, ()), await read_form(request)
        kind = f"archive.{form.text('do')}"
        if kind not in KINDS:
            raise InvalidRequest("invalid_value", "do is write, verify or restore.", param="do")
        if kind != "archive.verify":
            await require_proof(request)
        job = NewJob(
            kind=kind,
            digest=digest_of(name),
            starter=visitor.author().name,
            act="installation.read",
            back=f"/console/archives/{name}",
            can_cancel=kind == "archive.verify",
        )
        await start_job(request, job, _work(request, visitor, form, kind, name))
        return see_other(f"/console/archives/{name}")


def _work(request: ApiRequest, visitor: Visitor, form: FormValues, kind: str, month: str) -> Work:
    services, author = request.services, visitor.author(form.text("reason") or "")
    keep = form.text("keep") is not None

    async def work(progress: Progress) -> Any:
        from gateway.archive.lifecycle import Archiver

        expires = services.settings.metadata_retention_days is not None
        archiver = Archiver(
            services.database,
            services.blobs,
            author,
            metadata_expires=expires,
            progress=progress,
        )
        with refusals():
            if kind == "archive.write":
                return dict(periods.archive_view(await archiver.archive(month, keep=keep)))
            if kind == "archive.restore":
                return {"receipts": await archiver.restore(month)}
            manifest = await archiver.verify(month)
            return {"receipts": manifest.receipts, "files": len(manifest.files)}

    return work


def _month(connection: Connection, month: str) -> _Month | None:
    period = next((each for each in list_periods(connection) if each.month == month), None)
    if period is None:
        return None
    archived = {each["month"]: each for each in periods.list_archived(connection)}
    found = [find_latest(connection, kind, digest_of(month)) for kind in KINDS]
    jobs = sorted(
        (each for each in found if each is not None), key=lambda job: job.started_at, reverse=True
    )
    return _Month(period, archived.get(month), jobs)


def _title(archived: Sequence[ArchiveView]) -> str:
    if not archived:
        return "No month is archived"
    return f"{len(archived)} month{'' if len(archived) == 1 else 's'} archived"


def _month_title(found: _Month) -> str:
    month = found.period.month
    if found.archive is None:
        return f"{month} is in the database"
    states = {
        "verified": f"{month} is in files and in the database",
        "removed": f"{month} is archived",
    }
    return states.get(found.archive["state"], f"The archive of {month} is not complete")


HANDLERS: Final[list[Any]] = [ArchivePages]
