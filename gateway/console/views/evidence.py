"""Addresses of what a figure is made of: the bookings or the open requests that it sums. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import quote_plus

from gateway.billing.usage.coverage import midnight
from gateway.billing.usage.report import TAG, TIMES, Span
from gateway.checks.moments import read_day, timestamp
from gateway.console.scope import ALL

BOOKINGS: Final = "/console/usage/bookings"
REQUESTS: Final = "/console/requests"
OTHERS: Final = "other ("
"""Start of the label of a row that sums up many values."""


def bookings_url(
    starts_at: datetime, ends_at: datetime | None = None, **filters: str | None
) -> str:
    """Return the address of the bookings of a span; without an end, until the end of today. Without
    an account, they are those of all."""
    chosen = {
        "account": ALL,
        **{name: value for name, value in filters.items() if value is not None},
        "from": _stamped(starts_at),
        "to": None if ends_at is None else _stamped(ends_at),
    }
    return _url(BOOKINGS, chosen)


def open_requests_url(
    account: str | None = None, starts_at: datetime | None = None, **filters: str | None
) -> str:
    """Return the address of the requests that hold money now, with the sum of their holds; with a
    moment, of those that were accepted since."""
    return accepted_url(account, starts_at, **filters, status="open")


def accepted_url(account: str | None, starts_at: datetime | None, **filters: str | None) -> str:
    """Return the address of the requests that were accepted since a moment, with their sums."""
    since = None if starts_at is None else _stamped(starts_at)
    return _url(REQUESTS, {"account": account or ALL, **filters, "from": since, "sum": "yes"})


def row_url(labels: Mapping[str, str], span: Span, filters: Mapping[str, str | None]) -> str | None:
    """Return the address of the bookings of one row of a report; None if no filter selects them."""
    chosen, part = dict(filters), span
    for name, label in labels.items():
        if label.startswith(OTHERS) or (not label and not name.startswith(TAG)):
            return None
        if name in TIMES:
            part = _within(part, name, label)
        elif name.startswith(TAG):
            tag = f"{name.removeprefix(TAG)}={label}"
            if chosen.get("tag") not in (None, tag):
                return None
            chosen["tag"] = tag
        elif name in ("account", "model", "task", "key"):
            chosen[name] = label
        else:
            return None
    return bookings_url(part.starts_at, part.ends_at, **chosen)


def row_urls(
    rows: Sequence[Mapping[str, str]], span: Span, filters: Mapping[str, str | None]
) -> list[str | None]:
    """Return the addresses of the bookings of each row of a report, by its labels."""
    return [row_url(labels, span, filters) for labels in rows]


def _within(span: Span, unit: str, label: str) -> Span:
    """Return the part of a span that a label of time names."""
    if unit in ("hour", "minute"):
        first = datetime.fromisoformat(label)
        last = first + timedelta(hours=1) if unit == "hour" else first + timedelta(minutes=1)
    elif unit == "day":
        day = read_day(label)
        first, last = midnight(day, span.zone), midnight(day + timedelta(days=1), span.zone)
    else:
        day = read_day(f"{label}-01")
        after = (day + timedelta(days=31)).replace(day=1)
        first, last = midnight(day, span.zone), midnight(after, span.zone)
    return Span(max(first, span.starts_at), min(last, span.ends_at), span.zone)


def _url(path: str, values: Mapping[str, str | None]) -> str:
    chosen = (f"{name}={_quoted(value)}" for name, value in values.items() if value)
    return f"{path}?{'&'.join(chosen)}"


@functools.lru_cache(1024)
def _stamped(moment: datetime) -> str:
    return timestamp(moment)


@functools.lru_cache(4096)
def _quoted(value: str) -> str:
    return quote_plus(value)
