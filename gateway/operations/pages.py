"""Pages of lists: by the numbers of their rows, or by the places that are their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from gateway.checks.decoding import read_id
from gateway.errors import InvalidRequest


class Numbered(Protocol):
    @property
    def id(self) -> int: ...


Row = TypeVar("Row", bound=Numbered)
Placed = TypeVar("Placed")


def read_cursor(cursor: str | None, what: str) -> int:
    """Return the number after which a page begins. Raise ``InvalidRequest``.

    ``what`` names the rows, such as ``a key``.
    """
    after = 0 if cursor is None else read_id(cursor)
    if after is None:
        raise InvalidRequest(
            "invalid_value", f"{cursor!r} is not the number of {what}.", param="cursor"
        )
    return after


def cut_page(found: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
    """Cut rows, of which one more than ``limit`` was read, to a page; return it and the cursor of
    the next page."""
    more = str(found[limit - 1].id) if len(found) > limit else None
    return found[:limit], more


def read_place(cursor: str | None) -> tuple[int, int, str] | None:
    """Return the place after which a page begins: two numbers and a name. Raise
    ``InvalidRequest``."""
    if cursor is None:
        return None
    first, _, rest = cursor.partition(":")
    second, _, name = rest.partition(":")
    numbers = [0 if each == "0" else read_id(each) for each in (first, second)]
    if numbers[0] is None or numbers[1] is None:
        raise wrong_cursor(cursor)
    return numbers[0], numbers[1], name


def cut_places(
    found: Sequence[Placed], limit: int, place: Callable[[Placed], tuple[int, int, str]]
) -> tuple[Sequence[Placed], str | None]:
    """Cut rows, of which one more than ``limit`` was read, to a page; return it and the cursor of
    the next page: the place of its last row."""
    more = ":".join(map(str, place(found[limit - 1]))) if len(found) > limit else None
    return found[:limit], more


def wrong_cursor(cursor: str | None) -> InvalidRequest:
    return InvalidRequest(
        "invalid_value", f"{cursor!r} is not the cursor of an earlier page.", param="cursor"
    )
