"""Reads addresses and forms: the filters of a list, and what was entered.

Browsers send empty fields, which count as not sent. The address holds all of a page's state, so a
page is sent to a colleague by its address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time
from typing import Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from litestar.datastructures import FormMultiDict

from gateway.api.http.request import ApiRequest
from gateway.billing.usage.report import Span, read_span
from gateway.console.views.files import AS, CSV
from gateway.errors import InvalidRequest, TollgateError
from gateway.pricing import parse_usd

ROWS: Final = 50
"""Rows of a page of a list."""
FILE_ROWS: Final = 5_000
"""Rows of a list as a file, unless the list has an export of its own."""
SECONDS_MAX: Final = 1_000_000.0


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

    def at(self, path: str, **changes: str | None) -> str:
        """Return the address of another page with the filters of this one."""
        _, _, query = self.url(**changes).partition("?")
        return f"{path}?{query}" if query else path

    def url(self, **changes: str | None) -> str:
        """Return the address of this page with other filters; None removes one."""
        values = {name: changes.get(name, value) for name, value in self.values.items()}
        values |= {name: value for name, value in changes.items() if name not in values}
        kept = {name: value for name, value in values.items() if value}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path

    def pages(self, cursor: str | None) -> dict[str, str | None]:
        """Return the addresses of the next page and, unless this is it, of the first one."""
        return {
            "older": self.url(cursor=cursor) if cursor else None,
            "newest": self.url(cursor=None) if "cursor" in self.values else None,
        }


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
