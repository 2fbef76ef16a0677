"""Rows that were set aside, in the console: list, show, retry, release, and what stays unseen."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from gateway.aside import add_note, find_note
from gateway.sql.database import Database
from tests.console.seeding import HOSTILE, Seeded, seed
from tests.console.test_limits import words_of
from tests.console.visiting import Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG, wait_for

PAGE = "/console/set-aside"
CONTENT = "what the upstream made"


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("aside")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=8)
    database.dispose()
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


def put(installation: Installation, kind: str, name: str, content: str | None = None) -> str:
    reason = f"cannot be read: {HOSTILE}"
    with installation.database.transaction() as connection:
        add_note(connection, kind, name, reason, content=content)  # type: ignore[arg-type]
    return f"{PAGE}/row?kind={kind}&name={quote(name, safe='')}"


def is_noted(installation: Installation, kind: str, name: str) -> bool:
    with installation.database.transaction() as connection:
        return find_note(connection, kind, name) is not None  # type: ignore[arg-type]


def test_rows_are_listed_shown_retried_and_released(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    operator, auditor = installation.visitor("operator"), installation.visitor("auditor")
    assert "Nothing is set aside" in operator.get(PAGE).text
    hostile = f"org/m&{HOSTILE}"
    price, result = put(installation, "price", hostile), put(installation, "result", "req_1")

    listed = operator.get(PAGE).text
    assert "2 rows are set aside" in listed
    assert HOSTILE not in listed
    assert "req_1" not in operator.get(f"{PAGE}?kind=price").text
    shown = auditor.get(price).text
    assert HOSTILE not in shown
    assert 'value="retry"' not in shown
    assert auditor.post(price, {"do": "retry"}).status_code == 404
    assert operator.post(price, {"do": "forget"}).status_code == 400

    assert "Each gateway reads it again" in words_of(operator, price)
    assert operator.post(price, {"do": "retry", "reason": "upgraded"}).status_code == 303
    assert operator.post(result, {"do": "release"}).status_code == 303
    assert not is_noted(installation, "price", hostile)
    assert not is_noted(installation, "result", "req_1")
    assert operator.get(price).status_code == 404
    assert operator.post(price, {"do": "retry"}).status_code == 404
    (retried,) = installation.events(act="set_aside.retry")
    assert (retried.subject, retried.reason) == (f"price {hostile}", "upgraded")
    assert retried.before is not None
    assert retried.before["reason"].startswith("cannot be read")
    assert [each.subject for each in installation.events(act="set_aside.release")] == [
        "result req_1"
    ]


def test_released_request_ends_without_a_charge(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    operator = installation.visitor("operator")
    request_id = seeded.requests["atlas"][-1]
    path = put(installation, "request", request_id)
    assert "All that is held for it is released" in words_of(operator, path)

    assert operator.post(path, {"do": "release"}).status_code == 303

    wait_for(
        lambda: "failed" in words_of(operator, f"/console/requests/{request_id}"), "its receipt"
    )
    assert not is_noted(installation, "request", request_id)


def test_content_is_for_the_people_of_the_account(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    path = put(installation, "result", seeded.requests["atlas"][0], f'"{CONTENT}"')
    operator = installation.visitor("operator")

    hidden = operator.get(path).text
    assert CONTENT not in hidden
    assert "ask on the page of the request" in hidden

    owner = installation.visitor("owner", account="atlas")
    access = f"/console/accounts/{seeded.accounts['atlas'].id}/access"
    assert owner.post(access, {"hours": "1", "reason": "look"}).status_code == 303
    assert CONTENT in operator.get(path).text
    assert CONTENT not in installation.visitor("auditor").get(path).text
