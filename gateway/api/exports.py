"""Usage as a file to download, and the footer by which the file can be checked.

Files end ten seconds ago at the latest, so that nothing that is being booked can be missed, and the
same question gives the same bytes again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from litestar import Controller, Request, Response, get
from litestar.concurrency import sync_to_thread
from litestar.params import FromQuery, QueryParameter
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.api.access import find_asked
from gateway.api.answers import json_response
from gateway.api.usage import key_number
from gateway.billing.footer import MEDIA_TYPES, Footer, Format, Profile, footer_view
from gateway.billing.usage import Filters, Span, read_span
from gateway.database import Database
from gateway.errors import InvalidRequest, TooManyRequests

SETTLED_AFTER: Final = timedelta(seconds=10)
AT_ONCE: Final = 3
"""Each holds one of the database's connections for as long as it is read."""


@dataclass(frozen=True, slots=True)
class Question:
    span: Span
    filters: Filters
    format: Format
    profile: Profile
    name: str


class ExportsController(Controller):
    path = "/v1/usage/export"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        operation_id="ExportUsage",
        summary="Every charge and refund of a span as CSV or Parquet, native or FOCUS 1.2",
    )
    async def file(
        self,
        request: Request[Any, Any, Any],
        format: FromQuery[Format] = "csv",
        profile: FromQuery[Profile] = "native",
        tz: FromQuery[str | None] = None,
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        key: FromQuery[str | None] = None,
        model: FromQuery[str | None] = None,
        account: FromQuery[str | None] = None,
    ) -> Stream:
        asked = await _question(
            request, format, profile, tz=tz, first=first, last=last,
            key=key, model=model, account=account,
        )  # fmt: skip
        _running.check()
        return Stream(
            _parts(request.app.state.database, asked, Footer()),
            media_type=MEDIA_TYPES[format],
            headers={"Content-Disposition": f'attachment; filename="{asked.name}"'},
        )

    @get(
        "/footer",
        operation_id="GetExportFooter",
        summary="How many rows that file has, what they sum to, and its SHA-256",
    )
    async def footer(
        self,
        request: Request[Any, Any, Any],
        format: FromQuery[Format] = "csv",
        profile: FromQuery[Profile] = "native",
        tz: FromQuery[str | None] = None,
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        key: FromQuery[str | None] = None,
        model: FromQuery[str | None] = None,
        account: FromQuery[str | None] = None,
    ) -> Response[bytes]:
        asked = await _question(
            request, format, profile, tz=tz, first=first, last=last,
            key=key, model=model, account=account,
        )  # fmt: skip
        _running.check()
        footer = Footer()

        def read() -> None:
            for _ in _parts(request.app.state.database, asked, footer):
                pass

        await sync_to_thread(read)
        return json_response({**footer_view(footer), "file": asked.name})


async def _question(
    request: Request[Any, Any, Any],
    format: Format,
    profile: Profile,
    *,
    tz: str | None,
    first: str | None,
    last: str | None,
    key: str | None,
    model: str | None,
    account: str | None,
) -> Question:
    database: Database = request.app.state.database
    now = datetime.now(UTC)

    def read(connection: Connection) -> Question:
        owner = find_asked(request, connection, account)
        span = read_span(first, last, tz or owner.report_tz, now=now)
        # Whole seconds, so that the name of the file says exactly what is in it.
        latest = (now - SETTLED_AFTER).replace(microsecond=0)
        span = replace(span, ends_at=min(span.ends_at, latest))
        if span.starts_at >= span.ends_at:
            raise InvalidRequest(
                "invalid_value", "Nothing of that span has been booked yet.", param="from"
            )
        keys = None if key is None else (key_number(connection, owner.id, key),)
        models = None if model is None else (model,)
        dates = f"{span.starts_at:%Y%m%dT%H%M%SZ}-{span.ends_at:%Y%m%dT%H%M%SZ}"
        name = f"usage-{owner.id}-{dates}-{profile}.{format}"
        return Question(span, Filters((owner.id,), keys, models), format, profile, name)

    return await database.read(read)


class _Running:
    """Counts the exports that are being read, so that no more than a few are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def check(self) -> None:
        """Raise ``TooManyRequests`` if there are enough."""
        if self._count >= AT_ONCE:
            raise TooManyRequests(
                "too_many_exports",
                f"{AT_ONCE} exports are being written already; try again when one has ended.",
                retry_after_s=5,
            )

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1


_running = _Running()


def _parts(database: Database, asked: Question, footer: Footer) -> Iterator[bytes]:
    """Read on one snapshot from the first part to the last."""
    # Imported where it is used: it takes a while, and a gateway should answer soon.
    from gateway.billing.files import export

    with _running, database.snapshot() as connection:
        yield from export(
            connection,
            asked.span,
            asked.filters,
            format=asked.format,
            profile=asked.profile,
            footer=footer,
        )
