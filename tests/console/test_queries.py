"""The addresses of pages around the one that is shown, and the usual spans of reports."""

from __future__ import annotations

from datetime import UTC, date, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gateway.console.queries import BACK_MAX, Query, usual_spans
from gateway.console.views.formats import Clock


def query(address: str) -> Query:
    parts = urlsplit(address)
    given: Any = SimpleNamespace(
        url=SimpleNamespace(path=parts.path), query_params=dict(parse_qsl(parts.query))
    )
    return Query(given)


def walk(address: str, cursors: list[str]) -> list[str]:
    """Return the addresses of a page and of those after it."""
    visited = [address]
    for cursor in cursors:
        older = query(visited[-1]).pages(cursor)["older"]
        assert older is not None
        visited.append(older)
    return visited


def test_newer_leads_back_through_the_same_pages() -> None:
    visited = walk("/console/keys?status=active", ["a:1", "b:2", "c:3"])

    back = [visited[-1]]
    while (newer := query(back[-1]).pages(None)["newer"]) is not None:
        back.append(newer)

    assert back == visited[::-1]
    assert query(back[-1]).pages(None)["newest"] is None
    assert query(visited[3]).pages(None)["newest"] == "/console/keys?status=active"
    # The second page leads to the first one once.
    assert query(visited[1]).pages(None)["newest"] is None


def test_page_without_the_way_to_it_leads_to_the_newest() -> None:
    pages = query("/console/keys?cursor=b").pages("c")

    assert pages["newer"] is None
    assert pages["newest"] == "/console/keys"
    assert query(pages["older"] or "").pages(None)["newer"] == "/console/keys?cursor=b"


def test_way_back_is_bounded() -> None:
    visited = walk("/console/keys", [str(number) for number in range(100)])

    assert len(visited[-1]) < 10 * BACK_MAX
    newer = query(visited[-1]).pages(None)["newer"] or ""
    assert newer.startswith("/console/keys?cursor=98&back=59~60~")


def test_another_filter_begins_at_the_first_page() -> None:
    asked = query("/console/keys?status=active&cursor=b&back=~")

    assert asked.url(cursor=None) == "/console/keys?status=active"
    assert asked.narrowed == {"status"}


def test_usual_spans_are_days_of_the_zone() -> None:
    spans = {name: (first, last) for name, first, last in usual_spans(date(2026, 3, 1))}
    assert spans["today"] == ("2026-03-01", "2026-03-01")
    assert spans["yesterday"] == ("2026-02-28", "2026-02-28")
    assert spans["7 days"] == ("2026-02-23", "2026-03-01")
    assert spans["this month"] == ("2026-03-01", "2026-03-01")
    assert spans["last month"] == ("2026-02-01", "2026-02-28")

    # It is the first of the month in Kolkata already, and not in UTC.
    clock = Clock("Asia/Kolkata", datetime(2026, 2, 28, 19, 0, tzinfo=UTC))
    shown = query("/console/usage?by=model&from=2026-03-01&to=2026-03-01").presets(clock)
    assert [name for name, _, chosen in shown if chosen] == ["today", "this month"]
    assert shown[0][1] == "/console/usage?by=model&from=2026-03-01&to=2026-03-01"
    assert [name for name, _, chosen in query("/console/usage").presets(clock) if chosen] == [
        "30 days"
    ]
