"""The table of each list as a CSV file: the rows of its filters, and no cell that is computed."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from decimal import Decimal

import pytest

from gateway.billing.entries import entries
from gateway.console.views.files import TableFile, csv_lines, table_file
from tests.console.seeding import HOSTILE, Seeded, seed
from tests.console.visiting import Browser, Installation

OPERATOR = {
    "/console/ledger?account=atlas": "ledger",
    "/console/failures": "failures",
    "/console/accounts": "accounts",
    "/console/keys": "keys",
    "/console/margins": "margins",
    "/console/payments": "payments",
    "/console/prices": "prices",
    "/console/models": "models",
    "/console/webhooks": "webhooks",
    "/console/audit": "audit",
    "/console/organisations": "organisations",
}
OWNER = {
    "/console/batches": "batches",
    "/console/ledger": "ledger",
    "/console/keys": "keys",
    "/console/models": "models",
    "/console/audit": "audit",
    "/console/payments": "payments",
    "/console/webhooks": "webhooks",
}


@pytest.fixture(scope="module")
def seeded(installation: Installation) -> Seeded:
    return seed(installation.database, installation.settings.catalog)


def read(browser: Browser, path: str, name: str) -> list[dict[str, str]]:
    answer = browser.get(f"{path}{'&' if '?' in path else '?'}as=csv")
    assert answer.status_code == 200, path
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}.csv"'
    return list(csv.DictReader(io.StringIO(answer.text)))


@pytest.mark.parametrize(("role", "tables"), [("operator", OPERATOR), ("owner", OWNER)])
def test_each_table_has_a_file_and_its_page_leads_to_it(
    installation: Installation, seeded: Seeded, role: str, tables: dict[str, str]
) -> None:
    browser = installation.visitor(role, account="atlas")

    for path, name in tables.items():
        rows = read(browser, path, name)
        assert all(None not in row for row in rows), path
        assert ("as=csv" in browser.get(path).text) == bool(rows), path


def test_file_has_all_rows_with_exact_amounts(installation: Installation, seeded: Seeded) -> None:
    operator = installation.visitor("operator")

    rows = read(operator, "/console/ledger?account=atlas&cursor=5", "ledger")
    all_rows = read(operator, "/console/ledger?account=atlas", "ledger")
    charges = read(operator, "/console/ledger?account=atlas&kind=charge", "ledger")

    assert len(rows) < 5
    assert len(all_rows) > 50
    assert {row["kind"] for row in charges} == {"charge"}
    with installation.database.transaction() as connection:
        booked = entries(connection, seeded.accounts["atlas"].id, limit=10_000)
    assert [Decimal(row["amount"]) * 10**9 for row in all_rows] == [
        each.amount_nanos for each in booked
    ]
    assert datetime.fromisoformat(all_rows[0]["booked_at"]).tzinfo is not None


def test_files_of_members_are_about_their_own_account(
    installation: Installation, seeded: Seeded
) -> None:
    owner = installation.visitor("owner", account="zenith")

    assert {row["account"] for row in read(owner, "/console/keys", "keys")} == {"zenith"}
    assert owner.get("/console/accounts?as=csv").status_code == 404
    assert owner.get("/console/ledger?account=atlas&as=csv").status_code == 404


def test_cell_that_a_spreadsheet_would_compute_is_text(
    installation: Installation, seeded: Seeded
) -> None:
    evil = ("=1+1", "+A1", "-A1+2", "@SUM(A1)", "\tx", "\r=x", " =1+1", "\n=1", "\uff1d1")

    lines = csv_lines([[each] for each in evil]).decode()

    cells = [row[0] for row in csv.reader(io.StringIO(lines, newline=""))]
    assert all(cell.startswith("'") for cell in cells), cells
    numbers = csv_lines([["-0.5", -1, "-12", 3.5]]).decode()
    assert numbers == "-0.5,-1,-12,3.5\n"
    operator = installation.visitor("operator")
    names = [row["name"] for row in read(operator, "/console/accounts", "accounts")]
    assert f"b{HOSTILE}" in names


def test_file_that_is_cut_says_so() -> None:
    table = TableFile(
        "t", ("id", "labels.model"), [{"id": 1, "labels": {"model": "m"}}], is_cut=True
    )

    lines = table_file(table).decode().splitlines()

    assert lines[:2] == ["id,labels.model", "1,m"]
    assert lines[2].startswith("the rest is missing")
