"""Lists of open requests read a bounded number of them."""

from __future__ import annotations

import pytest

from gateway.ledger.holds import hold
from gateway.requests import lookup
from gateway.requests.lookup import RequestFilter
from gateway.sql.database import Database
from tests.ledger.books import open_books


@pytest.mark.parametrize("oldest_first", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        RequestFilter(None, model="rare"),
        RequestFilter(None, tags={"project": "rare"}),
        RequestFilter(None, task="text-to-image"),
    ],
)
def test_search_of_open_requests_stops_with_a_cursor(
    database: Database, choice: RequestFilter, oldest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = open_books(database, credit=10_000_000)
    orders = sorted((books.order() for _ in range(8)), key=lambda each: each.request_id)
    rare = {"model": "rare", "task": "text-to-image", "metadata": {"project": "rare"}}
    wanted = books.order(request_id=orders[4].request_id, **rare)
    with database.transaction() as connection:
        hold(connection, [*orders[:4], wanted, *orders[5:]])
    monkeypatch.setattr(lookup, "LOOKED_AT_MAX", 3)

    found, cursors, cursor = [], [], None
    with database.snapshot() as connection:
        while not cursors or cursor is not None:
            page, cursor = lookup.read_page(
                connection, choice, limit=20, cursor=cursor, oldest_first=oldest_first
            )
            found += [each.request_id for each in page]
            cursors.append(cursor)

    ids = [each.request_id for each in orders]
    assert found == [wanted.request_id]
    assert cursors == ([ids[2], ids[5], None] if oldest_first else [ids[5], ids[2], None])
