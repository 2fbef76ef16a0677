"""Days and moments: parsed from input, and formatted for answers."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
YEARS: Final = range(1900, 9999)
"""Accepted years: their days can be represented in every time zone."""
MICROSECOND: Final = timedelta(microseconds=1)
_MOMENT: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)


def microseconds_of(moment: datetime) -> int:
    """Return a moment as microseconds since 1970."""
    return (moment - EPOCH) // MICROSECOND


def moment_of(microseconds: int) -> datetime:
    """Return the moment that is a number of microseconds after 1970."""
    return EPOCH + timedelta(microseconds=microseconds)


def read_day(text: str) -> date:
    """Parse a day, YYYY-MM-DD. Raise ``ValueError``."""
    day = date.fromisoformat(text)
    if day.year not in YEARS:
        raise ValueError(f"years {YEARS.start} to {YEARS.stop - 1} are accepted")
    return day


def read_moment(text: object) -> datetime:
    """Parse a moment with its offset (RFC 3339) to UTC. Raise ``ValueError``."""
    if not isinstance(text, str) or not _MOMENT.fullmatch(text):
        raise ValueError("send a moment with its offset, such as 2026-03-01T10:00:00Z")
    moment = datetime.fromisoformat(text.upper())
    if moment.year not in YEARS:
        raise ValueError(f"years {YEARS.start} to {YEARS.stop - 1} are accepted")
    return moment.astimezone(UTC)


def timestamp(moment: datetime) -> str:
    """Format a moment as RFC 3339 in UTC, to the microsecond."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
