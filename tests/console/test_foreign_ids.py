"""What belongs to another account is answered exactly as what does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from difflib import unified_diff

import pytest
from sqlalchemy import func, select

from gateway.console.roles import MAY
from gateway.sql.database import Database
from gateway.tables.batches import batches, files
from gateway.tables.core import budgets, metadata, transfers
from gateway.tables.notices import notice_subscriptions
from gateway.tables.payments import payments
from gateway.tables.users import members, sessions
from gateway.tables.voices import voice_recordings
from tests.console.hostile import MONTH, furnish
from tests.console.payloads import Dealer
from tests.console.routes import console_routes
from tests.console.seeding import Seeded, seed
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG

OWN = {
    "account_id": "tests/console/test_roles.py asks with it",
    "name": "models, and types of the API, are those of everybody",
    "operation": "routes of the API are those of everybody",
    "month": "months are those of everybody",
    "worker": "of the installation",
    "act": "of the installation",
    "organisation_id": "of the installation",
    "job_id": "tests/console/test_prices.py has the job of another",
    "digest": "files of the console",
    "rest": "whatever does not exist",
}
"""Parts of addresses that name nothing of one account, and why."""
FIELDS = {"limit": "1", "role": "viewer", "name": "x", "overlap_s": "0"}
"""What forms need, so that they are not refused for their fields."""


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    """An installation in which atlas has something of every kind."""
    directory = tmp_path_factory.mktemp("foreign")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=12)
    furnish(database, catalog, seeded, Dealer())
    database.dispose()
    with installed(directory / "home", url, valkey) as made:
        made.visitor("owner", account="atlas")
        yield made, seeded


def ids(installation: Installation, seeded: Seeded) -> dict[str, tuple[str, str]]:
    """Return, by the part of an address, what atlas has, and what nobody has."""
    atlas = seeded.accounts["atlas"].id

    def newest(table: str, column: str = "id") -> str:
        of, owner = metadata.tables[table].c, "account_id"
        if table == "transfers":
            owner = "to_account"
        query = select(func.max(of[column])).where(of[owner] == atlas)
        found = installation.execute(query).scalar_one()
        assert found is not None, table
        return str(found)

    session = select(func.max(sessions.c.id)).join(members, members.c.user_id == sessions.c.user_id)
    return {
        "request_id": (seeded.requests["atlas"][-3], f"req_{'0' * 32}"),
        "key_id": (str(seeded.keys["web"].id), "999999"),
        "entry_id": (newest(transfers.name), "999999"),
        "budget_id": (newest(budgets.name), "999999"),
        "subscription_id": (newest(notice_subscriptions.name), "999999"),
        "user_id": (newest(members.name, "user_id"), "999999"),
        "session_id": (str(installation.execute(session).scalar_one()), "999999"),
        "batch_id": (newest(batches.name), f"batch_{'0' * 32}"),
        "file_id": (newest(files.name), f"file-{'0' * 32}"),
        "id": (newest(voice_recordings.name), f"voice_{'0' * 32}"),
        "payment_id": (newest(payments.name), f"pay_{'0' * 32}"),
        "position": ("0", "0"),
        "account_number": ("1", "999999"),
        "month": (MONTH, MONTH),
    }


def test_ids_of_another_account_look_like_ids_that_do_not_exist(
    two: tuple[Installation, Seeded],
) -> None:
    installation, seeded = two
    known = ids(installation, seeded)
    stranger = installation.visitor("owner", account="zenith")
    asked, wrong = 0, []

    for route in console_routes(installation.client.app):
        parts = set(re.findall(r"{(\w+)}", route.path)) - OWN.keys()
        if not parts or route.act is None or "owner" not in MAY[route.act]:
            continue
        assert parts <= known.keys(), route
        mine, nobodys = (
            at(route.path, {part: known[part][place] for part in known}) for place in (0, 1)
        )
        answers = [ask(stranger, route.method, path) for path in (mine, nobodys)]
        if "{account" not in route.path and answers[0] != answers[1]:
            pages = [page.splitlines() for _, page in answers]
            told = "\n".join(unified_diff(pages[0], pages[1], lineterm="", n=0))
            wrong.append((route.method, mine, told))
        if answers[0][0] != 404:
            wrong.append((route.method, mine, f"status {answers[0][0]}"))
        asked += 1

    assert wrong == [], "\n".join(map(str, wrong))
    assert asked > 20


def at(path: str, values: Mapping[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda part: values.get(part[1], "1"), path)


def ask(browser: Browser, method: str, path: str) -> tuple[int, str]:
    """Return the status of an answer, and its page without what differs with each."""
    answer = browser.get(path) if method == "GET" else browser.post(path, FIELDS)
    page = answer.text.replace(path, "")
    for part in path.split("/"):
        if len(part) > 30:
            page = page.replace(part, "")
    changing = r'nonce="[^"]*"|call_\w+|[0-9a-f]{128}|(?<=entry |udget |ssion |ember )\d+'
    return answer.status_code, re.sub(changing, "", page)


def test_statements_and_credit_notes_of_another_account_do_not_exist(
    two: tuple[Installation, Seeded],
) -> None:
    stranger = two[0].visitor("owner", account="zenith")
    month = f"{datetime.now(UTC):%Y-%m}"

    for end in ("", ".pdf", ".html"):
        for each in (MONTH, month):
            path = f"/console/statements/{each}{end}?account=atlas"
            assert stranger.get(path).status_code == 404, path
