"""Usage: by up to two dimensions, compared with an earlier span; every charge as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

from litestar import Controller, Response, get, post
from litestar.concurrency import sync_to_thread
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.request import ApiRequest
from gateway.api.native.exports import (
    SETTLED_AFTER,
    ExportRequest,
    export_file,
    export_span,
    read_footer,
    select_export_of,
)
from gateway.api.native.lists import owner_of_key
from gateway.api.native.usage import key_number
from gateway.billing.exports.footer import Format, Profile
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.comparison import COMPARISONS, Comparison, Earlier, aligned, earlier_span
from gateway.billing.usage.recent import newest_booking, tag_names
from gateway.billing.usage.report import (
    TAG,
    Filters,
    Group,
    Span,
    UsageSums,
    read_dimensions,
    read_span,
    stored_usage,
)
from gateway.billing.usage.rollups import built_range
from gateway.catalog.tasks import TASKS
from gateway.checks.moments import timestamp
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import NewJob, digest_of, find_latest
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.evidence import row_url
from gateway.console.views.files import attachment
from gateway.console.views.formats import Clock, usd
from gateway.console.views.usage import (
    MONEY,
    TOP,
    UsageTable,
    label_cells,
    metric_name,
    usage_csv,
    usage_table,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest

GROUPS: Final = ("day", "month", "hour", "model", "task", "key")
METRICS: Final = (
    *MONEY,
    *("requests", "input_tokens", "cached_input_tokens", "output_tokens", "images", "video_ms"),
    *("audio_ms", "characters", "steps", "gpu_us"),
)
ROWS_MAX: Final = 1000
"""Rows of a report that a page shows; the file has all."""
FORMATS: Final = ("csv", "parquet")
PROFILES: Final = ("native", "focus")
ALL_ACCOUNTS: Final = 0
"""In place of an account, whose exports share their slots."""


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    """What a page asks for."""

    account: Account | None
    span: Span
    by: tuple[str, ...]
    filters: Filters
    earlier: Earlier | None


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    question: UsageQuestion
    groups: Sequence[Group]
    before: Sequence[Group] | None
    tags: Sequence[str]
    sealed_until: datetime | None
    newest: datetime | None
    """The newest booking, if the span has none."""


class UsagePages(Controller):
    path = "/usage"

    @get(guards=[needs("usage.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query = Query(request)
        metric = query.one_of("metric", METRICS) or "net"
        top = None if query.one_of("top", ("all",)) else TOP
        answer = await _answer(request, visitor, query)
        asked = answer.question
        table = usage_table(answer.groups, answer.before, by=asked.by, metric=metric, top=top)
        if query.text("format") == "csv":
            return _csv(table)
        rows = table.rows[:ROWS_MAX]
        chosen = {name: query.text(name) for name in ("model", "task", "key", "tag")}
        chosen["account"] = asked.account.name if asked.account else None
        return await page(
            request,
            visitor,
            "money/usage.html",
            title=_title(asked.account, table),
            asked=asked,
            table=table,
            rows=[
                (
                    row,
                    label_cells(row, asked.by, query.url),
                    row_url(row.labels, asked.span, chosen),
                )
                for row in rows
            ],
            proof=row_url({}, asked.span, chosen),
            cut=len(table.rows) > ROWS_MAX,
            answer=answer,
            groups=[*GROUPS, *(["account"] if visitor.role else []), *_tags(answer.tags)],
            metrics=[(name, metric_name(name)) for name in METRICS],
            comparisons=COMPARISONS,
            tasks=tuple(TASKS),
            filters=query.values,
            presets=query.presets(Clock(visitor.zone, datetime.now(UTC))),
            most=max((row.value for row in rows), default=0),
            csv=query.url(format="csv"),
            all_rows=query.url(top="all"),
            charges=_charges_url(query, asked),
        )

    @get("/charges", guards=[needs("usage.read")])
    async def charges(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Offer every charge of a span as a file, with its rows, sum and digest once known."""
        query = Query(request)
        selection, account = await _selection(request, visitor, query)
        selections = {
            (profile, format): replace(selection, profile=profile, format=format)
            for profile in PROFILES
            for format in FORMATS
        }
        digests = {place: _footer_digest(each) for place, each in selections.items()}
        jobs = await request.services.database.read(
            lambda connection: {
                place: find_latest(connection, "footer", digest)
                for place, digest in digests.items()
            }
        )
        running = next((job for job in jobs.values() if job is not None and job.is_running), None)
        return await page(
            request,
            visitor,
            "money/charges.html",
            title=f"Every charge{f' of {account.name}' if account else ''}",
            span=selection.span,
            fixed=query.url(to=timestamp(selection.span.ends_at)),
            files=[
                (profile, format, each.name, jobs[profile, format])
                for (profile, format), each in selections.items()
            ],
            running=running,
            filters=query.values,
            file_url=lambda profile, format: query.url(
                to=timestamp(selection.span.ends_at), profile=profile, format=format
            ).replace("/charges", "/file", 1),
        )

    @post("/charges", guards=[needs("usage.read")])
    async def count(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Start reading a file to its end, for its rows, sum and digest."""
        query = Query(request)
        form = await request.form()
        selection, account = await _selection(request, visitor, query)
        selection = replace(
            selection,
            profile=_one_of(str(form.get("profile")), PROFILES),
            format=_one_of(str(form.get("format")), FORMATS),
        )
        job = NewJob(
            kind="footer",
            digest=_footer_digest(selection),
            starter=visitor.author().name,
            act="usage.read",
            account_id=account.id if account else None,
            back=query.url(),
        )
        slot_of = account.id if account else ALL_ACCOUNTS

        async def work(progress: Progress) -> dict[str, Any]:
            read = partial(read_footer, request.services, selection, slot_of, progress)
            return dict(await sync_to_thread(read))

        await start_job(request, job, work)
        return see_other(query.url())

    @get("/file", guards=[needs("usage.read")])
    async def file(self, request: ApiRequest, visitor: CurrentVisitor) -> Stream:
        selection, account = await _selection(request, visitor, Query(request))
        return export_file(request, selection, account_id=account.id if account else ALL_ACCOUNTS)


async def _answer(request: ApiRequest, visitor: Visitor, query: Query) -> UsageAnswer:
    services = request.services

    def read(connection: Connection) -> tuple[Any, ...]:
        asked = _question(connection, visitor, query)
        report = stored_usage(connection, asked.span, asked.by, asked.filters)
        before = None
        if asked.earlier is not None:
            span = asked.earlier.span
            before = stored_usage(connection, span, asked.by, asked.filters)
        built = built_range(connection)
        newest = None if report.groups else newest_booking(connection, asked.filters.account_ids)
        tags = tag_names(connection, asked.filters.account_ids)
        return asked, report, before, tags, built and built[1], newest

    asked, report, before, tags, sealed_until, newest = await services.database.report(
        read, account_id=visitor.account_id
    )
    reports: list[UsageSums] = [each for each in (report, before) if each is not None]
    for each in reports:
        await add_archived(each, services.database, services.blobs, account_id=visitor.account_id)
    return UsageAnswer(
        question=asked,
        groups=report.groups,
        before=None if before is None else aligned(before.groups, asked.earlier),
        tags=tags,
        sealed_until=sealed_until,
        newest=newest,
    )


def _question(connection: Connection, visitor: Visitor, query: Query) -> UsageQuestion:
    now = datetime.now(UTC)
    account = account_of(connection, visitor, query.text("account"))
    chosen = [query.text("by") or "day", query.text("by2") or ""]
    by = read_dimensions(",".join(chosen), accounts=visitor.role is not None)
    span = read_span(query.text("from"), query.text("to"), visitor.zone, now=now)
    how = cast("Comparison | None", query.one_of("vs", COMPARISONS))
    return UsageQuestion(
        account=account,
        span=span,
        by=by,
        filters=usage_filters(connection, account, query),
        earlier=None if how is None else earlier_span(span, how, now=now),
    )


def usage_filters(connection: Connection, account: Account | None, query: Query) -> Filters:
    """Read the filters of an address. Raise ``InvalidRequest``."""
    model, task, key = query.text("model"), query.one_of("task", tuple(TASKS)), query.text("key")
    tags = {}
    if tag := query.text("tag"):
        name, equal, value = tag.partition("=")
        if not name or not equal:
            raise InvalidRequest("invalid_value", f"tag is {tag!r}; write name=value.", param="tag")
        tags[name] = value
    account_ids = (account.id,) if account else None
    key_ids = (key_number(connection, account.id, key),) if key and account else None
    if key is not None and account is None:
        owner, key_id = owner_of_key(connection, key)
        account_ids, key_ids = (owner,), (key_id,)
    return Filters(
        account_ids=account_ids,
        key_ids=key_ids,
        models=(model,) if model else None,
        tasks=(task,) if task else None,
        tags=tags,
    )


async def _selection(
    request: ApiRequest, visitor: Visitor, query: Query
) -> tuple[ExportRequest, Account | None]:
    """Return what is to be exported, and of which account."""
    accounts: list[Account | None] = []

    def read(connection: Connection) -> ExportRequest:
        account = account_of(connection, visitor, query.text("account"))
        accounts.append(account)
        if query.text("tag"):
            raise InvalidRequest(
                "invalid_value", "Files are not chosen by tag; each row has its tags.", param="tag"
            )
        span = export_span(connection, query.text("from"), query.text("to"), visitor.zone)
        return ExportRequest(
            span,
            usage_filters(connection, account, query),
            cast("Format", query.one_of("format", FORMATS) or "csv"),
            cast("Profile", query.one_of("profile", PROFILES) or "native"),
            str(account.id) if account else "all",
        )

    found = await select_export_of(request.services, read, account_id=visitor.account_id)
    return found, accounts[-1]


def _footer_digest(selection: ExportRequest) -> str:
    filters = selection.filters
    chosen = (filters.account_ids, filters.key_ids, filters.models, filters.tasks)
    return digest_of(selection.name, str(selection.span.zone), chosen)


def _charges_url(query: Query, asked: UsageQuestion) -> str | None:
    dropped = dict.fromkeys(("by", "by2", "metric", "vs", "top", "tag", "format"))
    span = booked_part(asked.span)
    if span is None:
        return None
    return query.url(**dropped, **span).replace("/usage", "/usage/charges", 1)


def booked_part(span: Span) -> dict[str, str] | None:
    """Return the part of a span in which everything is booked, as fields; None if it is too recent.

    It ends with a whole second, so that each visit of a page has the same.
    """
    ends_at = min(span.ends_at, datetime.now(UTC) - SETTLED_AFTER).replace(microsecond=0)
    if span.starts_at >= ends_at:
        return None
    return {"from": timestamp(span.starts_at), "to": timestamp(ends_at)}


def _tags(names: Sequence[str]) -> list[str]:
    return [f"{TAG}{name}" for name in names]


def _csv(table: UsageTable) -> Response[bytes]:
    name = "usage-by-" + "-".join(each.replace(":", "-") for each in table.by)
    safe = "".join(each if each.isalnum() or each in "-_." else "-" for each in name)
    return Response(
        usage_csv(table),
        media_type="text/csv; charset=utf-8",
        headers=attachment(f"{safe}.csv"),
    )


def _title(account: Account | None, table: UsageTable) -> str:
    of = f" of {account.name}" if account else ""
    return f"Usage{of}: {usd(table.total.sums.net_nanos)}"


def _one_of(value: str, accepted: tuple[str, ...]) -> Any:
    if value not in accepted:
        raise InvalidRequest("invalid_value", f"{value!r} is not one of {', '.join(accepted)}.")
    return value


HANDLERS: Final[list[Any]] = [UsagePages]
