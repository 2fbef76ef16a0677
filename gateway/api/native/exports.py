"""Usage as a file to download, and a footer to verify the file with.

Files end at least ten seconds ago, so that no booking in progress is missed and the same parameters
return the same bytes again. A file is read page by page: a slow client occupies a slot for exports,
but no database connection.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeVar

from litestar import Controller, Response, get
from litestar.background_tasks import BackgroundTask
from litestar.concurrency import sync_to_thread
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.accounts.roles import check_role
from gateway.api.http.access import requested_account
from gateway.api.http.answers import json_response
from gateway.api.http.request import ApiRequest, Services
from gateway.api.native.usage import key_number, one_of
from gateway.archive.marks import removed_archives
from gateway.billing.exports.footer import (
    MEDIA_TYPES,
    Footer,
    FooterView,
    Format,
    Profile,
    footer_view,
)
from gateway.billing.usage.report import Filters, Span, read_span
from gateway.errors import Forbidden, InvalidRequest, TooManyRequests, Unavailable
from gateway.sql.database import Database
from workers.contract.blobs import BlobError, Blobs

T = TypeVar("T")

SETTLED_AFTER: Final = timedelta(seconds=10)
EXPORTS_MAX: Final = 6
"""Maximum concurrent exports of a gateway; each has a page of rows in memory."""
ACCOUNT_EXPORTS_MAX: Final = 2
"""Maximum concurrent exports of an account."""
CONCURRENT_PAGES: Final = 2
"""Maximum number of pages read concurrently, in the slow lane."""
STALLED_S: Final = 60.0
"""Seconds without progress after which an export loses its slot."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    span: Span
    filters: Filters
    format: Format
    profile: Profile
    owner: str
    """What the name of the file says about whose usage it is."""
    margins: bool = False
    """Whether rows have their cost to the operator."""

    @property
    def name(self) -> str:
        starts_at, ends_at = self.span.starts_at, self.span.ends_at
        dates = f"{starts_at:%Y%m%dT%H%M%SZ}-{ends_at:%Y%m%dT%H%M%SZ}"
        margins = "-margins" if self.margins else ""
        return f"usage-{self.owner}-{dates}-{self.profile}{margins}.{self.format}"


class FileFooterView(FooterView):
    file: str


async def read_export(
    request: ApiRequest,
    format: FromQuery[Format] = "csv",
    profile: FromQuery[Profile] = "native",
    tz: FromQuery[str | None] = None,
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    account: FromQuery[str | None] = None,
    margins: FromQuery[bool] = False,
) -> ExportRequest:
    """Litestar dependency: the requested export. ``margins`` is for administrators only."""
    if margins:
        check_margins(request)

    def read(connection: Connection) -> ExportRequest:
        owner = requested_account(request, connection, account, "usage")
        keys = None if key is None else (key_number(connection, owner.id, key),)
        filters = Filters((owner.id,), keys, one_of(model))
        zone = tz or owner.report_tz
        span = export_span(connection, first, last, zone)
        return ExportRequest(span, filters, format, profile, str(owner.id), margins)

    return await select_export(request, read)


def check_margins(request: ApiRequest) -> None:
    """Raise ``Forbidden`` unless the caller is an administrator who may read usage."""
    if "admin" not in request.key.scopes:
        raise Forbidden("missing_scope", "margins requires a key with the scope admin.")
    check_role(request.key.role or "operator", "usage", write=False)


async def select_export(
    request: ApiRequest, read: Callable[[Connection], ExportRequest]
) -> ExportRequest:
    """Read what the caller exports, as ``select_export_of`` does."""
    return await select_export_of(request.services, read, account_id=request.key.account_id)


async def select_export_of(
    services: Services, read: Callable[[Connection], ExportRequest], *, account_id: int | None
) -> ExportRequest:
    """Read what is to be exported. Raise ``Unavailable`` if a file of an archived month is missing,
    while that can still be answered: what is damaged is found when it is read."""
    selection = await services.database.report(read, account_id=account_id)
    booked = (selection.span.starts_at, selection.span.ends_at)
    for archive in await services.database.read(lambda each: removed_archives(each, booked)):
        assert archive.manifest is not None
        for file in archive.manifest.of("receipts"):
            try:
                await services.blobs.size(file.key)
            except BlobError:
                raise Unavailable(
                    "archive_unavailable",
                    f"The file {file.key} of the archive is missing or cannot be read.",
                    should_retry=False,
                ) from None
    return selection


def export_span(connection: Connection, first: str | None, last: str | None, zone: str) -> Span:
    """Read the span of an export, of which everything is booked. Raise ``InvalidRequest``."""
    now = datetime.now(UTC)
    span = read_span(first, last, zone, now=now)
    # Whole seconds, so that the file name states the exact span.
    latest = (now - SETTLED_AFTER).replace(microsecond=0)
    span = replace(span, ends_at=min(span.ends_at, latest))
    if span.starts_at >= span.ends_at:
        raise InvalidRequest(
            "invalid_value", "That span is too recent: nothing in it is booked yet.", param="from"
        )
    return span


def export_file(
    request: ApiRequest, selection: ExportRequest, *, account_id: int | None = None
) -> Stream:
    """Answer with an export, which takes a slot of an account, by default that of the key.

    Raise ``TooManyRequests`` if no slot is free.
    """
    slot = _slots.take(request.key.account_id if account_id is None else account_id)
    file = _File(request.services.database, request.services.blobs, selection, slot)
    return Stream(
        file,
        background=BackgroundTask(file.close),
        media_type=MEDIA_TYPES[selection.format],
        headers={"Content-Disposition": f'attachment; filename="{selection.name}"'},
    )


async def export_footer(request: ApiRequest, selection: ExportRequest) -> Response[FileFooterView]:
    """Answer with the footer of an export. Raise ``TooManyRequests`` if no slot is free."""
    read = functools.partial(read_footer, request.services, selection, request.key.account_id)
    return json_response(await sync_to_thread(read))


def read_footer(
    services: Services,
    selection: ExportRequest,
    account_id: int,
    progress: Callable[[int], None] | None = None,
) -> FileFooterView:
    """Read an export to its end, and return its footer. Blocks for minutes.

    ``progress`` is told how many rows are read. Raise ``TooManyRequests`` if no slot is free.
    """
    slot = _slots.take(account_id)
    file = _File(services.database, services.blobs, selection, slot)
    for _ in file:
        if progress is not None:
            progress(file.footer.rows)
    return {**footer_view(file.footer), "file": selection.name}


class ExportsController(Controller):
    path = "/v1/usage/export"
    dependencies = {"selection": Provide(read_export)}
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        opt={"media": ["text/csv", "application/vnd.apache.parquet"], "errors": [404, 429]},
        operation_id="ExportUsage",
        summary="Every charge and refund of a span as CSV or Parquet, native or FOCUS 1.2",
    )
    async def file(
        self,
        request: ApiRequest,
        selection: NamedDependency[ExportRequest],
    ) -> Stream:
        return export_file(request, selection)

    @get(
        "/footer",
        opt={"errors": [404, 429]},
        operation_id="GetExportFooter",
        summary="How many rows that file has, what they sum to, and its SHA-256",
    )
    async def footer(
        self,
        request: ApiRequest,
        selection: NamedDependency[ExportRequest],
    ) -> Response[FileFooterView]:
        return await export_footer(request, selection)


class ExportSlots:
    """Limits the exports of this process, in total and per account."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[ExportCursor] = set()

    def take(self, account_id: int) -> ExportCursor:
        """Occupy a slot. Raise ``TooManyRequests`` if none is free."""
        with self._lock:
            since = time.monotonic() - STALLED_S
            for slot in [slot for slot in self._taken if slot.moved_at < since]:
                self._taken.remove(slot)
            if sum(slot.account_id == account_id for slot in self._taken) >= ACCOUNT_EXPORTS_MAX:
                raise _too_many(f"This account already has {ACCOUNT_EXPORTS_MAX} exports running")
            if len(self._taken) >= EXPORTS_MAX:
                raise _too_many(f"{EXPORTS_MAX} exports are already running")
            slot = ExportCursor(account_id)
            self._taken.add(slot)
        return slot

    def move(self, slot: ExportCursor) -> None:
        """Record progress. Raise ``ConnectionAbortedError`` if the slot was lost."""
        with self._lock:
            if slot not in self._taken:
                raise ConnectionAbortedError(f"the client read nothing for {STALLED_S:g} s")
            slot.moved_at = time.monotonic()

    def leave(self, slot: ExportCursor) -> None:
        with self._lock:
            self._taken.discard(slot)


@dataclass(eq=False, slots=True)
class ExportCursor:
    account_id: int
    moved_at: float = field(default_factory=time.monotonic)


def _too_many(what: str) -> TooManyRequests:
    return TooManyRequests(
        "too_many_exports", f"{what}; try again when one has ended.", retry_after_s=5
    )


_slots = ExportSlots()
_pages = threading.Semaphore(CONCURRENT_PAGES)


class _File:
    """Iterates over the parts of an export, and frees its slot at the end.

    ``close`` frees it when the client disconnects, and the garbage collector if nothing was sent.
    """

    def __init__(
        self, database: Database, blobs: Blobs, selection: ExportRequest, slot: ExportCursor
    ) -> None:
        self.footer = Footer()
        self._database = database
        self._blobs = blobs
        self._slot = slot
        self._leave = weakref.finalize(self, _slots.leave, slot)
        self._parts = self._export(selection)

    def _export(self, selection: ExportRequest) -> Iterator[bytes]:
        # Imported late: it takes a while, and a gateway should start quickly.
        from gateway.billing.exports.files import export

        return export(
            functools.partial(_read, self._database),
            selection.span,
            selection.filters,
            format=selection.format,
            profile=selection.profile,
            footer=self.footer,
            margins=selection.margins,
            blobs=self._blobs,
        )

    async def close(self) -> None:
        self._leave()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        _slots.move(self._slot)
        try:
            part = next(self._parts)
        except BaseException:
            self._leave()
            raise
        _slots.move(self._slot)
        return part


def _read(database: Database, function: Callable[[Connection], T]) -> T:
    with _pages, database.snapshot() as connection:
        return function(connection)
