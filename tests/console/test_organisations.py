"""Organisations in the console: accounts, budgets of the whole and of the parts, statements."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from html import unescape

import pytest

from gateway.accounts.organisations import accounts_at, create_organisation
from tests.console.seeding import HOSTILE, Seeded, seeded_database
from tests.console.test_limits import words_of
from tests.console.visiting import Installation, installed

PAGE = "/console/organisations"


@pytest.fixture(scope="module")
def grouped(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("organisations")
    url, seeded = seeded_database(directory, postgres, requests=30)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def group(grouped: tuple[Installation, Seeded]) -> str:
    """The page of an organisation with two accounts, one of a hostile name."""
    operator = grouped[0].visitor("operator")
    answer = operator.post(PAGE, {"name": f"group{HOSTILE}", "reason": "merger"})
    path = str(answer.headers["location"])
    for name in ("atlas", f"b{HOSTILE}"):
        assert operator.post(f"{path}/accounts", {"account": name}).status_code == 303
    return path


def test_accounts_are_added_and_removed(grouped: tuple[Installation, Seeded], group: str) -> None:
    installation, seeded = grouped
    operator = installation.visitor("operator")
    page = operator.get(group).text
    assert HOSTILE not in page
    assert HOSTILE not in operator.get(PAGE).text
    again = operator.post(f"{group}/accounts", {"account": "atlas"})
    assert (again.status_code, 'id="problem-account"' in again.text) == (409, True)
    unknown = operator.post(f"{group}/accounts", {"account": HOSTILE})
    assert (unknown.status_code, HOSTILE in unknown.text) == (404, False)

    zenith = seeded.accounts["zenith"].id
    assert operator.get(f"{group}/accounts/{zenith}/remove").status_code == 404
    assert operator.post(f"{group}/accounts", {"account": "zenith"}).status_code == 303
    removal = f"{group}/accounts/{zenith}/remove"
    assert "stay with it" in words_of(operator, removal)
    assert operator.post(removal, {"reason": "sold"}).status_code == 303
    number = int(group.rpartition("/")[2])
    with installation.database.transaction() as connection:
        assert zenith not in accounts_at(connection, number)
    events = installation.events(subject=f"organisation {number}")
    assert [(each.act, each.reason) for each in events] == [
        ("organisation.remove", "sold"), ("organisation.add", ""), ("organisation.add", ""),
        ("organisation.add", ""), ("organisation.create", "merger"),
    ]  # fmt: skip


def test_budgets_of_the_whole_and_of_the_parts(
    grouped: tuple[Installation, Seeded], group: str
) -> None:
    installation, seeded = grouped
    finance, atlas = installation.visitor("finance"), str(seeded.accounts["atlas"].id)
    whole = {"limit": "10", "window": "month", "hard": "yes", "name": "all"}
    assert finance.post(f"{group}/budgets", whole).status_code == 303
    part = {"limit": "6", "window": "month", "hard": "yes", "of": atlas, "name": "share"}
    assert finance.post(f"{group}/budgets", part).status_code == 303
    shown = words_of(finance, group)
    assert "$6 $4 left" in shown
    too_much = finance.post(f"{group}/budgets", {**part, "limit": "7", "name": "more"})
    assert too_much.status_code == 409
    zenith = str(seeded.accounts["zenith"].id)
    assert finance.post(f"{group}/budgets", {**part, "of": zenith}).status_code == 404

    numbers = dict.fromkeys(re.findall(rf"{group}/budgets/(\d+)", finance.get(group).text))
    first, *_ = numbers
    changed = {"limit": "12", "hard": "yes", "whole": "yes", "overallot": "yes"}
    assert finance.post(f"{group}/budgets/{first}", changed).status_code == 303
    assert "more is allowed" in words_of(finance, group)
    for number in numbers:
        assert finance.post(f"{group}/budgets/{number}", {"do": "end"}).status_code == 303
    assert finance.post(f"{group}/budgets/999999", {"limit": "1"}).status_code == 404
    acts = [each.act for each in installation.events() if each.act.startswith("budget.")]
    assert acts.count("budget.end") == len(numbers)
    assert {"budget.create", "budget.change"} < set(acts)


def test_usage_and_statements_are_those_of_its_accounts(
    grouped: tuple[Installation, Seeded], group: str
) -> None:
    auditor = grouped[0].visitor("auditor")
    for by in ("account", "model", "day"):
        assert auditor.get(f"{group}?by={by}").status_code == 200
    link = re.search(r'<a href="([^"]+as=csv)"', auditor.get(f"{group}?by=model").text)
    assert link is not None
    table = list(csv.DictReader(io.StringIO(auditor.get(unescape(link[1])).text)))
    assert {row["labels.model"] for row in table}
    assert sum(int(row["requests"]) for row in table) > 0
    assert all(
        Decimal(row["cost"]) - Decimal(row["refund"]) == Decimal(row["net"]) for row in table
    )
    month = f"{datetime.now(UTC):%Y-%m}"
    statement = auditor.get(f"{group}/statements/{month}")
    assert "A draft" in statement.text
    assert HOSTILE not in statement.text
    for form, start in (("csv", b"month,"), ("pdf", b"%PDF"), ("html", b"<!")):
        answer = auditor.get(f"{group}/statements/{month}.{form}")
        assert answer.content.lower().startswith(start.lower()), form
    assert auditor.get(f"{group}/statements/2026-13").status_code == 400


def test_only_roles_of_the_installation_see_them(
    grouped: tuple[Installation, Seeded], group: str
) -> None:
    installation, _ = grouped
    with installation.database.transaction() as connection:
        other = create_organisation(connection, "other").id
    for role in ("owner", "finance", "auditor"):
        browser = installation.visitor(role)
        expected = 404 if role == "owner" else 200
        assert browser.get(PAGE).status_code == expected
        assert browser.get(group).status_code == expected
        assert browser.post(PAGE, {"name": "mine"}).status_code == 404
        assert browser.post(f"{PAGE}/{other}", {"name": "mine"}).status_code == 404
        assert browser.post(f"{group}/accounts", {"account": "zenith"}).status_code == 404
    operator = installation.visitor("operator")
    assert operator.post(f"{PAGE}/{other}", {"name": "renamed"}).status_code == 303
    assert operator.post(f"{PAGE}/999999", {"name": "renamed"}).status_code == 404
    assert "renamed" in operator.get(PAGE).text
