"""Formats amounts, moments, durations and numbers for people. Pure.

Money is exact: the decimal of ``format_usd``, in which nothing is rounded. Templates get integers
of nano-dollars and aware moments, and format them here only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from gateway.checks.moments import timestamp
from gateway.pricing import format_usd

MINUS: Final = "\N{MINUS SIGN}"
DASH: Final = "\N{EN DASH}"
GROUP_SPACE: Final = "\N{NARROW NO-BREAK SPACE}"
SIGNIFICANT: Final = 2
"""Digits of an amount that stand out, so that 0.0000032 and 0.032 differ at a glance."""
GROUPED_FROM: Final = 10_000


class Piece(NamedTuple):
    """A part of an amount; ``ink`` digits stand out."""

    text: str
    ink: bool


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount, split at its decimal point, so that columns can be aligned there."""

    plain: str
    integer: tuple[Piece, ...]
    fraction: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """The time zone of a page, and the moment at which it was made."""

    zone: str
    now: datetime

    @property
    def tz(self) -> tzinfo:
        return UTC if self.zone == "UTC" else ZoneInfo(self.zone)

    @property
    def midnight(self) -> datetime:
        """Return when the present day of the zone began."""
        local = self.local(self.now)
        # Of two midnights, if a change of clocks repeats it, the first one.
        return local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0).astimezone(UTC)

    def local(self, moment: datetime) -> datetime:
        return moment.astimezone(self.tz)


def usd(nanos: int) -> str:
    """Format a single figure, such as ``$0.0000032``; a minus comes before the dollar sign."""
    text = format_usd(abs(nanos))
    return f"{MINUS if nanos < 0 else ''}${_grouped(text)}"


def amount(nanos: int) -> Amount:
    """Split an amount for a cell of a table, whose column names the currency."""
    plain = format_usd(nanos)
    sign = MINUS if nanos < 0 else ""
    integer, _, decimals = plain.removeprefix("-").partition(".")
    lead = len(integer) if integer != "0" else 0
    # The position of the first digit that counts: in the integer, or after the fraction's zeros.
    first = 0 if lead else len(decimals) - len(decimals.lstrip("0"))
    inked = range(first, first + SIGNIFICANT)
    if lead:
        whole: tuple[Piece, ...] = (Piece(f"{sign}{integer}", True),)
        split = max(0, SIGNIFICANT - lead)
        fraction = _pieces((decimals[:split], True), (decimals[split:], False))
    else:
        whole = _pieces((sign, True), (integer, False))
        fraction = _pieces(
            (decimals[:first], False),
            (decimals[first : inked.stop], True),
            (decimals[inked.stop :], False),
        )
    return Amount(plain, whole, fraction)


def places(amounts: Iterable[int | None]) -> int:
    """Return the number of decimals of the longest amount of a column."""
    return max(
        (len(format_usd(nanos).partition(".")[2]) for nanos in amounts if nanos is not None),
        default=0,
    )


def when(moment: datetime, clock: Clock) -> str:
    """Format a moment in the page's zone: the time of today, otherwise with the date."""
    local, now = clock.local(moment), clock.local(clock.now)
    if local.date() == now.date():
        return _time(local)
    date = f"{local.day} {local:%b}"
    return f"{date} {local:%H:%M}" if local.year == now.year else f"{date} {local.year}"


def precisely(moment: datetime, clock: Clock) -> str:
    """Format a moment with its date, time and zone."""
    local = clock.local(moment)
    return f"{local.day} {local:%b %Y} {_time(local)} {clock.zone}"


def iso(moment: datetime) -> str:
    return timestamp(moment)


def ago(moment: datetime, clock: Clock) -> str:
    """Format the distance of a moment from now, such as ``3 min ago`` or ``in 2 h``."""
    seconds = round((clock.now - moment).total_seconds())
    distance = _rough(abs(seconds))
    return f"{distance} ago" if seconds >= 0 else f"in {distance}"


def duration(us: int | None) -> str:
    """Format microseconds: ``704 µs``, ``1.61 s``, ``2 min 04 s``; a dash if unknown."""
    if us is None:
        return DASH
    if us < 1000:
        return f"{us} µs"
    if us < 1_000_000:
        return f"{_three(us / 1000)} ms"
    if us < 60_000_000:
        return f"{_three(us / 1_000_000)} s"
    minutes, seconds = divmod(round(us / 1_000_000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int) -> str:
    """Format a whole number, in groups of three digits if it is long."""
    return _grouped(str(number)) if number >= 0 else f"{MINUS}{_grouped(str(-number))}"


def size(octets: int) -> str:
    """Format a number of bytes, such as ``1.4 MB``."""
    value, unit = float(octets), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{octets} B" if unit == "B" else f"{_three(value)} {unit}"


def share(part: float, whole: float) -> str:
    """Format a part of a whole in percent; a dash without a whole."""
    return DASH if not whole else f"{100 * part / whole:.1f} %"


def rate(per_second: float | None) -> str:
    """Format a number per second: whole above 100, otherwise with one decimal."""
    if per_second is None:
        return DASH
    return count(round(per_second)) if per_second >= 100 else f"{per_second:.1f}"


def words(identifier: str) -> str:
    """Write an identifier as words: ``first_token`` and ``text-to-image`` without their joints."""
    return identifier.replace("_", " ").replace("-", " ")


def _time(local: datetime) -> str:
    """Format a time with milliseconds; whole minutes, such as ends of spans, without seconds."""
    if not local.second and not local.microsecond:
        return f"{local:%H:%M}"
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03d}"


def _rough(seconds: int) -> str:
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"


def _three(value: float) -> str:
    """Format with three significant digits."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _grouped(text: str) -> str:
    whole, point, rest = text.partition(".")
    if int(whole) < GROUPED_FROM:
        return text
    return f"{int(whole):,}".replace(",", GROUP_SPACE) + point + rest


def _pieces(*parts: tuple[str, bool]) -> tuple[Piece, ...]:
    return tuple(Piece(text, ink) for text, ink in parts if text)
