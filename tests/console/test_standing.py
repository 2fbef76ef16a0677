"""What the first pages and the accounts say of the present: figures that operators act on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select, update

from gateway.accounts import accounts as accounts_module
from gateway.audit_log import Author, record
from gateway.billing.usage.report import Group
from gateway.catalog.problems import CatalogProblem
from gateway.catalog.reloads import note_refusal
from gateway.console.views.money import ALL_RULES, RULES
from gateway.console.views.overview import dearest
from gateway.tables.core import accounts, periods
from tests.console.seeding import Seeded, seeded_database
from tests.console.visiting import Installation, installed

FIGURE = re.compile(r"<div><dt>([^<]*)</dt><dd>(.*?)</dd></div>", re.S)


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, mid_month: None
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("standing")
    url, seeded = seeded_database(directory, postgres)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


def figures(page: str) -> dict[str, str]:
    return {
        name: " ".join(re.sub(r"<[^>]+>", " ", text).split()) for name, text in FIGURE.findall(page)
    }


def test_overview_has_what_operators_act_on(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    month = datetime.now(UTC).date().isoformat()[:7]
    installation.execute(update(periods).values(state="open"))
    operator = installation.visitor("operator")

    page = operator.get("/console").text
    found = figures(page)

    curves = re.findall(r'data-points="(\w+)"', page)
    assert curves == ["accepted_curve", "failed_curve", "charged_curve", "first_curve"]
    assert found["Months to close"].startswith("0 ")
    assert month not in found["Months to close"]
    assert found["Webhooks failing"].startswith("0 ")
    assert found["First output, p95, 1 h"] == "\N{EN DASH} too few requests"


def test_overview_tells_the_last_load_of_the_catalog(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    operator = installation.visitor("operator")
    problems = [CatalogProblem("catalog.yaml", 3, 5, "models[0].price", "is missing")]
    ann = Author("ann", "cli")

    with installation.database.transaction() as connection:
        note_refusal(connection, ann, problems)
    refused = figures(operator.get("/console").text)["Catalog"]
    assert "refused" in refused
    assert "by ann: 1 problem; the one before is in force" in refused

    with installation.database.transaction() as connection:
        changed = {"changed": ["echo"], "models": 4}
        record(connection, ann, "catalog.load", "catalog", after=changed)
    assert "loaded by ann, 1 price changed" in figures(operator.get("/console").text)["Catalog"]


def test_rules_are_those_that_are_proved(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    operator = installation.visitor("operator")

    operator.post("/console/ledger/prove")
    operator.finished("/console/ledger")

    assert f"{min(RULES, key=_number)}\N{EN DASH}{max(RULES, key=_number)}" == ALL_RULES
    assert f"{ALL_RULES} agree" in operator.get("/console").text


def _number(rule: str) -> int:
    return int(rule.removeprefix("R"))


@pytest.mark.parametrize(
    ("role", "may"), [("operator", True), ("finance", True), ("auditor", False)]
)
def test_books_are_proved_from_the_overview_by_those_who_may(
    filled: tuple[Installation, Seeded], role: str, may: bool
) -> None:
    page = filled[0].visitor(role).get("/console").text

    assert ('action="/console/ledger/prove"' in page) is may


def test_the_dearest_come_first_with_their_change_against_the_same_label_before() -> None:
    def sums(**net: int) -> dict[str, Group]:
        return {name: Group({}, 1, 1, 1_000 + nanos, 1_000) for name, nanos in net.items()}

    rows = dearest(sums(d=0, b=50, a=150, c=7, e=-5, f=-6), sums(a=100, b=100))

    assert [(row.name, row.net_nanos, row.change) for row in rows] == [
        ("a", 150, "+50.0 %"),
        ("b", 50, "\N{MINUS SIGN}50.0 %"),
        ("c", 7, "new"),
        ("d", 0, "\N{EN DASH}"),
        ("e", -5, "\N{EN DASH}"),
    ]


def test_accounts_near_zero_come_first_and_pages_go_on(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    operator = installation.visitor("operator")

    def names(page: str) -> list[str]:
        return re.findall(r'class="open" href="/console/accounts/(\d+)"', page)

    first = operator.get("/console/accounts").text
    by_number = names(operator.get("/console/accounts?order=number").text)
    with installation.database.transaction() as connection:
        available = accounts.c.posted_nanos - accounts.c.held_nanos + accounts.c.credit_limit_nanos
        rows = connection.execute(
            select(accounts.c.id, available.label("left")).where(accounts.c.kind == "customer")
        ).all()
    expected = [str(row.id) for row in sorted(rows, key=lambda row: (row.left, row.id))]
    second = expected[1]
    left = next(row.left for row in rows if str(row.id) == second)

    assert names(first) == expected
    assert by_number == sorted(expected, key=int)
    rest = operator.get(f"/console/accounts?cursor={left}:{second}").text
    assert names(rest) == expected[2:]
    for wrong in ("nothing", f"{2**63}:1", f"-{2**63}:1", "--1:1", "\u0661:1", f"1:{2**63}"):
        assert operator.get(f"/console/accounts?cursor={wrong}").status_code == 400, wrong
    for known in (f"{2**63 - 1}:1", f"-{2**63 - 1}:1"):
        assert operator.get(f"/console/accounts?cursor={known}").status_code == 200, known
    atlas = first.partition(f'href="/console/accounts/{seeded.accounts["atlas"].id}"')[2]
    assert ">2<" in atlas.partition('data-label="Open"')[2].partition("</td>")[0]
    assert "ago" in atlas.partition('data-label="Last request"')[2].partition("</td>")[0]


def test_only_the_newest_of_many_accounts_are_sorted(
    filled: tuple[Installation, Seeded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts_module, "SORTED_MAX", 2)
    installation, _ = filled

    page = installation.visitor("operator").get("/console/accounts").text

    found = re.findall(r'class="open" href="/console/accounts/(\d+)"', page)
    with installation.database.transaction() as connection:
        query = select(accounts.c.id).where(accounts.c.kind == "customer")
        ids = connection.scalars(query.order_by(accounts.c.id.desc())).all()
    assert {int(id) for id in found} == set(ids[:2])
    assert "newest accounts are in this order" in page


def test_account_is_opened_with_its_zone_and_allowance(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    operator = installation.visitor("operator")

    made = operator.post(
        "/console/accounts/new",
        {"name": "berlin", "allowance": "2.50", "report_tz": "Europe/Berlin"},
    )
    wrong = operator.post("/console/accounts/new", {"name": "nowhere", "report_tz": "Mars/Base"})

    page = operator.get(made.headers["location"]).text
    assert "$2.5 a month" in page
    assert "Europe/Berlin" in page
    for place in ("/console/members?account=id:", "/console/webhooks?account=berlin"):
        assert place in page
    assert wrong.status_code == 400
    with installation.database.transaction() as connection:
        count = select(func.count()).where(accounts.c.name == "nowhere")
        assert connection.execute(count).scalar_one() == 0


def test_home_has_the_spend_of_the_month(filled: tuple[Installation, Seeded]) -> None:
    page = filled[0].visitor("viewer", account="atlas").get("/console/home").text

    assert figures(page)["Spent this month"].startswith("$")
