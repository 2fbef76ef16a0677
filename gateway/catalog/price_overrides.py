"""Prices that an operator sets, with the syntax and the rules of the catalog file.

A price override must cover what its model's tasks use, just as the list price must. It is therefore
checked as a part of the catalog entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.catalog.document import Document, Unreadable
from gateway.catalog.loader import complaints, dotted, load_catalog
from gateway.catalog.schema import Catalog, CatalogEntry, Pricing
from gateway.checks.moments import read_moment
from gateway.ledger.prices import OPERATOR_NOTICE_S
from gateway.pricing import Price


class InvalidPriceOverride(ValueError):
    """The price is not valid for the model."""


def read_price_override(entry: CatalogEntry, value: Mapping[str, Any]) -> Price:
    """Check a price for a model. Raise ``InvalidPriceOverride`` that lists every error."""
    if unknown := set(value) - {"price", "minimum"}:
        raise InvalidPriceOverride(
            f"{min(unknown)!r} is not a field of a price; accepted: price, minimum"
        )
    fields = entry.model_dump(exclude={"price", "minimum"}, exclude_unset=True)
    try:
        return CatalogEntry.model_validate({**fields, **value}).selling_price
    except ValidationError as error:
        raise InvalidPriceOverride(_explained(error)) from None


def read_start(text: str | None, now: datetime) -> datetime:
    """Read the start of a price: ISO 8601 with a UTC offset, or None for as soon as possible.

    Raise ``InvalidPriceOverride`` if it is too early: every gateway must know a price before it
    applies.
    """
    earliest = now + timedelta(seconds=OPERATOR_NOTICE_S)
    if text is None:
        return earliest
    moment = read_scheduled(text)
    if moment < earliest:
        raise InvalidPriceOverride(
            f"the price starts at {text}, but the earliest possible start is "
            f"{earliest.isoformat(timespec='seconds')}: every gateway must know it beforehand"
        )
    return moment


def read_scheduled(text: str) -> datetime:
    """Read the start of a price that is already scheduled. Raise ``InvalidPriceOverride``."""
    try:
        return read_moment(text)
    except ValueError as error:
        raise InvalidPriceOverride(f"{text!r} is not a valid moment: {error}") from None


def read_prices(path: Path) -> dict[str, Price]:
    """Read a list of prices: a catalog file, or a file with ``prices`` by model name.

    Raise ``CatalogError``, ``InvalidPriceOverride`` or ``OSError``.
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
        try:
            found[str(name)] = read_offer(str(name), offer)
        except InvalidPriceOverride as error:
            raise InvalidPriceOverride(f"{path}: {error}") from None
    return found


def read_offer(name: str, offer: object) -> Price:
    """Read a price without the entry of its model, so that it is not known what it has to cover.

    Raise ``InvalidPriceOverride``.
    """
    try:
        return Pricing.model_validate(offer).selling_price
    except ValidationError as error:
        raise InvalidPriceOverride(f"{name}: {_explained(error)}") from None


def _explained(error: ValidationError) -> str:
    """Return every error of a price, in the words of the catalog's own errors."""
    found = (
        f"{dotted(place)}: {message}" if place else message for place, message in complaints(error)
    )
    return "; ".join(dict.fromkeys(found))
