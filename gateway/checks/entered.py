"""Checks of input by operators and clients, by command or HTTP: names, texts, moments, amounts.

Every function that stores such input calls these, so that commands and all dialects refuse the same
values. Each returns the value to store, or raises ``ValueError``. Knows no SQL.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Final

from gateway.pricing import NANOS_PER_USD, format_usd

NAME_MAX: Final = 200
REASON_MAX: Final = 500
REFERENCE_MAX: Final = 120
CREDIT_MAX_NANOS: Final = 10_000_000 * NANOS_PER_USD
"""Maximum of one credit, chargeback, allowance or credit limit: more is a typing error."""
BALANCE_MAX_NANOS: Final = 1_000_000_000 * NANOS_PER_USD
"""Maximum balance, and maximum debt, of one account: sums over accounts stay within 64 bits."""

_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""Every time zone can represent the moments before it."""
_RESERVED_NAMES: Final = frozenset({"all", "everybody", ".", ".."})
"""Names that have another meaning in commands or paths."""
_TURNS: Final = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Classes of characters that embed, isolate or override a text direction."""
_RESERVED_PREFIXES: Final = ("id:", "system:", "receivable:")


def check_account_name(name: str, *, what: str = "account") -> str:
    """Check the name of an account or organisation: it must not be a number, and be usable in a
    path."""
    check_text(name, f"the name of an {what}", longest=NAME_MAX, required=True)
    if name != name.strip():
        raise ValueError(f"the name {name!r} starts or ends with a blank")
    if "/" in name:
        raise ValueError(f"the name {name!r} contains a slash")
    if not any(not character.isnumeric() for character in name):
        raise ValueError(
            f"the name {name!r} is a number, and {what}s are found by number too; "
            "add a letter, such as customer-30"
        )
    if name.casefold() in _RESERVED_NAMES or name.casefold().startswith(_RESERVED_PREFIXES):
        raise ValueError(f"the name {name!r} is reserved")
    return name


def check_text(text: str, what: str, *, longest: int, required: bool = False) -> str:
    """Check a name, reason or reference: its length, and that it has printable characters only."""
    if required and not text.strip():
        raise ValueError(f"{what} is empty")
    if len(text) > longest:
        raise ValueError(f"{what} has {len(text)} characters; at most {longest} are accepted")
    for character in text:
        if not character.isprintable() and character != " ":
            name = unicodedata.name(character, "a control character")
            raise ValueError(f"{what} contains U+{ord(character):04X} ({name.lower()})")
    return text


def check_label(text: str, what: str, *, longest: int) -> str:
    """Check a name that a client gives to a voice or a file: any script, but no control characters.

    Unlike ``check_text`` it accepts characters of common file names, such as narrow spaces and
    joiners. Characters that change the text direction are refused, because they can make a name
    look like another one.
    """
    if len(text) > longest:
        raise ValueError(f"{what} has {len(text)} characters; at most {longest} are accepted")
    for character in text:
        controls = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        if controls or unicodedata.bidirectional(character) in _TURNS:
            name = unicodedata.name(character, "a control character")
            raise ValueError(f"{what} contains U+{ord(character):04X} ({name.lower()})")
    return text


def check_moment(moment: datetime, what: str) -> datetime:
    """Check a moment with its offset, and return it in UTC."""
    try:
        found = moment.astimezone(UTC)
    except OverflowError:
        found = None
    if found is None or not _EARLIEST <= found < _LATEST:
        raise ValueError(f"{what} is {moment.isoformat()}; it must be between 1970 and 9999")
    return found


def check_amount(nanos: int, what: str, *, least: int = 1, most: int = CREDIT_MAX_NANOS) -> int:
    """Check an amount of money in nano-dollars."""
    if nanos < least:
        rule = "cannot be negative" if least == 0 else "must be positive"
        raise ValueError(f"{what} {rule}; it is ${format_usd(nanos)}")
    if nanos > most:
        raise ValueError(
            f"{what} is ${format_usd(nanos)}; at most ${format_usd(most)} are accepted at a time"
        )
    return nanos
