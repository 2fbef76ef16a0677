"""Reads addresses and forms: the filters of a list, and what was entered.

Browsers send empty fields, which count as not sent. The address holds all of a page's state, so a
page is sent to a colleague by its address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from litestar.datastructures import FormMultiDict

from gateway.api.http.request import ApiRequest
from gateway.billing.usage.report import Span, read_span
from gateway.console.views.files import AS, CSV
from gateway.console.views.formats import Clock
from gateway.errors import InvalidRequest, TollgateError
from gateway.pricing import parse_usd

ROWS: Final = 50
"""Rows of a page of a list."""
FILE_ROWS: Final = 5_000
"""Rows of a list as a file, unless the list has an export of its own."""
SECONDS_MAX: Final = 1_000_000.0
DEFAULT_SPAN: Final = "30 days"
"""The span of a report whose address has none."""
CURSORS: Final = ("cursor", "back", "before")
"""Parameters that say which page of a list is shown."""
BACK_MAX: Final = 40
"""Pages that can be gone back without the newest one; each has its cursor in the address."""
_END: Final = "~"
"""Ends each cursor in ``back``. No cursor contains it."""


class Query:
    """The filters in a page's address."""

    def __init__(self, request: ApiRequest) -> None:
        self.path: str = request.url.path
        self.values: Mapping[str, str] = {
            name: value for name, value in request.query_params.items() if value
        }

    @property
    def rows(self) -> int:
        """Return how many rows are wanted: a page of the list, or all of its file."""
        return FILE_ROWS if self.values.get(AS) == CSV else ROWS

    def text(self, name: str) -> str | None:
        return self.values.get(name)

    def one_of(self, name: str, accepted: Sequence[str]) -> str | None:
        """Return a value of a fixed set. Raise ``InvalidRequest``."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise InvalidRequest(
                "invalid_value",
                f"{name} is {value!r}; accepted: {', '.join(accepted)}.",
                param=name,
            )
        return value

    def amount(self, name: str) -> int | None:
        """Return an amount in nano-dollars. Raise ``InvalidRequest``."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            return parse_usd(value.removeprefix("$"))
        except ValueError as error:
            raise InvalidRequest("invalid_value", f"{name}: {error}.", param=name) from None

    def seconds(self, name: str) -> int | None:
        """Return a time that was entered in seconds, in microseconds. Raise ``InvalidRequest``."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= SECONDS_MAX:
            raise InvalidRequest(
                "invalid_value", f"{name} is {value!r}; enter seconds, such as 2.5.", param=name
            )
        return round(seconds * 1_000_000)

    def span(self, zone: str) -> Span | None:
        """Return the days from ``from`` to ``to`` in a zone; None without either."""
        first, last = self.text("from"), self.text("to")
        if first is None and last is None:
            return None
        return read_span(first, last, zone, now=datetime.now(UTC))

    def presets(self, clock: Clock) -> list[tuple[str, str, bool]]:
        """Return the usual spans of a report, in days of the page's zone: each one's name, its
        address, and whether it is shown."""
        chosen = self.text("from"), self.text("to")
        spans = usual_spans(clock.local(clock.now).date())
        if chosen == (None, None):
            chosen = next((first, last) for name, first, last in spans if name == DEFAULT_SPAN)
        return [
            (name, self.url(**{"from": first, "to": last}), chosen == (first, last))
            for name, first, last in spans
        ]

    def at(self, path: str, **changes: str | None) -> str:
        """Return the address of another page with the filters of this one."""
        _, _, query = self.url(**changes).partition("?")
        return f"{path}?{query}" if query else path

    def url(self, **changes: str | None) -> str:
        """Return the address of this page with other filters; None removes one."""
        if any(name in changes for name in CURSORS):
            changes = {**dict.fromkeys(CURSORS), **changes}
        values = {name: changes.get(name, value) for name, value in self.values.items()}
        values |= {name: value for name, value in changes.items() if name not in values}
        kept = {name: value for name, value in values.items() if value}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path

    @property
    def narrowed(self) -> frozenset[str]:
        """Names of the filters, without those that only say which page is shown."""
        return frozenset(self.values).difference(CURSORS)

    def pages(self, cursor: str | None) -> dict[str, str | None]:
        """Return the addresses of the pages after and before this one, and of the first one.

        ``back`` has the cursors of the pages before this one, in order, so a page of which rows are
        gone still begins where it did. It is empty on pages that nobody came to from the first.
        """
        here, back = self.text("cursor"), (self.text("back") or "").split(_END)[:-1]
        older = newer = newest = None
        if cursor:
            known = [*back, here or ""] if back or not here else [here]
            trail = "".join(f"{each}{_END}" for each in known[-BACK_MAX:])
            older = self.url(cursor=cursor, back=trail)
        if back:
            trail = "".join(f"{each}{_END}" for each in back[:-1])
            newer = self.url(cursor=back[-1] or None, back=trail or None)
        if here and back != [""]:
            newest = self.url(cursor=None)
        return {"older": older, "newer": newer, "newest": newest}


def usual_spans(today: date) -> list[tuple[str, str, str]]:
    """Return names, first and last days of the spans that reports are usually asked for."""
    month = today.replace(day=1)
    last_month = month - timedelta(days=1)
    spans = (
        ("today", today, today),
        ("yesterday", today - timedelta(days=1), today - timedelta(days=1)),
        ("7 days", today - timedelta(days=6), today),
        ("30 days", today - timedelta(days=29), today),
        ("this month", month, today),
        ("last month", last_month.replace(day=1), last_month),
    )
    return [(name, first.isoformat(), last.isoformat()) for name, first, last in spans]


class FormValues:
    """The fields of a form that was sent."""

    def __init__(self, form: FormMultiDict) -> None:
        self._form = form

    def text(self, name: str) -> str | None:
        value = self._form.get(name)
        return value.strip() or None if isinstance(value, str) else None

    def raw(self, name: str) -> str:
        """Return a text as it was sent."""
        value = self._form.get(name)
        return value if isinstance(value, str) else ""

    def words(self, name: str) -> list[str]:
        """Return names that are separated by commas or spaces."""
        return (self.text(name) or "").replace(",", " ").split()

    def every(self, name: str) -> list[str]:
        """Return the values of all ticked boxes with a name."""
        return [each for each in self._form.getall(name, []) if isinstance(each, str) and each]

    def number(self, name: str) -> int | None:
        """Return a whole number. Raise ``InvalidRequest``."""
        value = self.text(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal():
            raise InvalidRequest("invalid_value", f"{value!r} is not a whole number.", param=name)
        return int(value)

    def amount(self, name: str) -> str | None:
        """Return an amount as it is sent to the API: a decimal without a dollar sign."""
        value = self.text(name)
        return None if value is None else value.removeprefix("$")

    def end_of_day(self, name: str, zone: ZoneInfo) -> str | None:
        """Return the last moment of a day in a zone, as the API reads it. Raise
        ``InvalidRequest``."""
        value = self.text(name)
        if value is None:
            return None
        try:
            day = datetime.fromisoformat(value).date()
        except ValueError:
            raise InvalidRequest(
                "invalid_value", f"{value!r} is not a day; use YYYY-MM-DD.", param=name
            ) from None
        return datetime.combine(day, time(23, 59, 59), zone).astimezone(UTC).isoformat()

    def values(self) -> dict[str, str]:
        """Return what was entered, to show the form again."""
        return {name: str(value) for name, value in self._form.items() if name != "csrf"}


def local_moment(text: str, zone: str, name: str) -> datetime:
    """Read a moment as browsers send it: without an offset, in the zone of the page.

    Raise ``InvalidRequest``.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            "invalid_value",
            f"{text!r} is not a moment; write it as 2026-12-01T09:30, in {zone}.",
            param=name,
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=ZoneInfo(zone))).astimezone(UTC)


async def read_form(request: ApiRequest) -> FormValues:
    return FormValues(await request.form())


def problems_of(error: TollgateError | None) -> Mapping[str, str]:
    """Return the mistakes of a form by the names of its fields."""
    return {} if error is None or error.param is None else {error.param: error.message}
