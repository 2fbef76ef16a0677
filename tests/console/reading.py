"""Reads figures from pages, as people see them: without marks, and exact."""

from __future__ import annotations

import re
from decimal import Decimal
from html import unescape
from typing import NamedTuple

_ROW = re.compile(r"<tr\b([^>]*)>(.*?)</tr>", re.S)
_CELL = re.compile(r"<t[hd]\b([^>]*)>(.*?)(?=<t[hd]\b|$)", re.S)
_LABEL = re.compile(r'data-label="([^"]*)"')


class Row(NamedTuple):
    """A row of a table: its cells in order, and those with a label by it."""

    attributes: str
    cells: list[str]
    labelled: dict[str, str]


def plain(html: str) -> str:
    """Return the text of a piece of a page, in one line."""
    joined = re.sub(r"</?(b|span|a)\b[^>]*>", "", html)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", joined)).split())


def number(text: str) -> Decimal:
    """Read a figure, with or without the currency and spaces within it."""
    bare = re.sub("[$\N{NARROW NO-BREAK SPACE} ]", "", text)
    return Decimal(bare.replace("\N{MINUS SIGN}", "-"))


def rows_of(html: str, part: str = "tbody") -> list[Row]:
    """Return the rows of the first table of a piece of a page."""
    body = html.partition(f"<{part}")[2].partition(f"</{part}>")[0]
    found = []
    for attributes, inner in _ROW.findall(body):
        cells = _CELL.findall(inner)
        labelled = {
            unescape(label[1]): plain(text)
            for head, text in cells
            if (label := _LABEL.search(head)) is not None
        }
        found.append(Row(attributes, [plain(text) for _, text in cells], labelled))
    return found


def section(html: str, id: str) -> str:
    """Return a page from the element with an id to the end of its section."""
    return html.partition(f'id="{id}"')[2].partition("</section>")[0]


def figures(html: str) -> dict[str, str]:
    """Return the large figures of a page by their names, without what is said beside them."""
    found = re.findall(r"<div><dt>([^<]*)</dt><dd>(.*?)</dd></div>", html, re.S)
    return {plain(name): plain(text.partition("<small")[0]) for name, text in found}
