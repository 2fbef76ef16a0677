"""Pages of lists whose order is that of their rows' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from gateway.checks.decoding import read_id
from gateway.errors import InvalidRequest


class Numbered(Protocol):
    @property
    def id(self) -> int: ...


Row = TypeVar("Row", bound=Numbered)


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
