"""Months in UTC, as texts such as ``2026-11``, and their ends."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

_MONTH: Final = re.compile(r"20[0-9]{2}-(?:0[1-9]|1[0-2])", re.ASCII)
_END: Final = "2100-01"
"""The month after the last one that is accepted."""


class MonthSpan(NamedTuple):
    """The first instant of a month, and the first of the next."""

    starts_at: datetime
    ends_at: datetime


def month_of(moment: datetime) -> str:
    """Return a moment's month in UTC as ``2026-11``; these strings sort chronologically."""
    utc = moment.astimezone(UTC)
    return f"{utc.year:04d}-{utc.month:02d}"


def is_month(text: str) -> bool:
    """Whether a text is a month of the form ``2026-11``, from 2000-01 to 2099-12."""
    return _MONTH.fullmatch(text) is not None


def span_of(month: str) -> MonthSpan:
    """Return both ends of a month. Raise ``ValueError`` if the text is not a month."""
    return MonthSpan(starts_at(month), starts_at(next_month(month)))


def next_month(month: str) -> str:
    """Return the month after another. Raise ``ValueError`` if the text is not a month."""
    _check(month)
    year, number = divmod(int(month[:4]) * 12 + int(month[5:]), 12)
    return f"{year:04d}-{number + 1:02d}"


def starts_at(month: str) -> datetime:
    """Return the first instant of a month. Raise ``ValueError`` if the text is not a month."""
    _check(month)
    return datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC)


def _check(month: str) -> None:
    if month != _END and not is_month(month):
        raise ValueError(f"{month!r} is not a month; use YYYY-MM, such as 2026-11")
