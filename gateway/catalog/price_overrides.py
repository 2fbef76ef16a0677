"""Prices that an operator sets: read as in the catalog file, and held to the same rules.

A price of an account's own must cover what its model's tasks use just as the list price must, so
it is checked as if it stood in the catalog entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.catalog.document import Document, Unreadable
from gateway.catalog.loader import load_catalog
from gateway.catalog.rules import Conflicts
from gateway.catalog.schema import Catalog, CatalogEntry, Pricing
from gateway.checks.moments import read_moment
from gateway.ledger.prices import OPERATOR_NOTICE_S
from gateway.pricing import Price


class InvalidPriceOverride(ValueError):
    """A price that cannot be sold at, and why."""


def read_price_override(entry: CatalogEntry, value: Mapping[str, Any]) -> Price:
    """Check a price for a model. Raise ``InvalidPriceOverride`` that lists every mistake."""
    if unknown := set(value) - {"price", "minimum"}:
        raise InvalidPriceOverride(
            f"{min(unknown)!r} is no part of a price; there are price and minimum"
        )
    told = entry.model_dump(exclude={"price", "minimum"}, exclude_unset=True)
    try:
        return CatalogEntry.model_validate({**told, **value}).selling_price
    except ValidationError as error:
        raise InvalidPriceOverride("; ".join(_complaints(error))) from None


def read_start(text: str | None, now: datetime) -> datetime:
    """Read when a price is to begin: soon, or at a moment with its offset that lies ahead.

    Every gateway must know it before it applies. Raise ``InvalidPriceOverride`` if it is too near.
    """
    earliest = now + timedelta(seconds=OPERATOR_NOTICE_S)
    if text is None:
        return earliest
    moment = read_scheduled(text)
    if moment < earliest:
        raise InvalidPriceOverride(
            f"a price can begin at {earliest.isoformat(timespec='seconds')} at the earliest, not "
            f"at {text}: every gateway must know it before it counts"
        )
    return moment


def read_scheduled(text: str) -> datetime:
    """Read the start of a price that is scheduled already."""
    try:
        return read_moment(text)
    except ValueError as error:
        raise InvalidPriceOverride(f"{text!r} is not a valid moment: {error}") from None


def read_prices(path: Path) -> dict[str, Price]:
    """Read the prices of a whole list: a catalog file, or one of ``prices`` by model alone.

    Raise ``CatalogError`` or ``InvalidPriceOverride``, or ``OSError`` if it cannot be read.
    """
    try:
        value = Document(path.read_text()).value
    except (Unreadable, UnicodeDecodeError):
        value = None
    if not isinstance(value, dict) or "prices" not in value:
        catalog: Catalog = load_catalog(path)
        return {entry.name: entry.selling_price for entry in catalog.models}
    found = {}
    for name, offer in (value["prices"] or {}).items():
        # No entry to check it against: what it does not cover is reported where it is missing.
        try:
            found[str(name)] = Pricing.model_validate(offer).selling_price
        except ValidationError as error:
            raise InvalidPriceOverride(f"{path}: {name}: {'; '.join(_complaints(error))}") from None
    return found


def _complaints(error: ValidationError) -> list[str]:
    said = []
    for each in error.errors(include_url=False):
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, Conflicts):
            said += [f"{_place(place)}{message}" for place, message in cause.found]
        else:
            said.append(f"{_place(each['loc'])}{each['msg'].removeprefix('Value error, ')}")
    return list(dict.fromkeys(said))


def _place(place: tuple[str | int, ...]) -> str:
    return f"{'.'.join(map(str, place))}: " if place else ""
