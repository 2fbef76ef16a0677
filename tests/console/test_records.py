"""Erasures, archives and retention in the console: summaries, proofs, jobs, the audit log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, select, update

from gateway.accounts.accounts import create_account
from gateway.billing.usage.minutes import HOUR
from gateway.billing.usage.rollups import build_due
from gateway.console.jobs.store import digest_of
from gateway.sql.database import Database
from gateway.tables.core import receipts
from gateway.tables.usage import usage_hours
from gateway.tables.users import sessions
from tests.archive.months import make_month
from tests.console.reading import rows_of
from tests.console.seeding import HOSTILE, Seeded, seeded_database
from tests.console.test_limits import words_of
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases

ERASURES = "/console/erasures"
ARCHIVES = "/console/archives"
RETENTION = "/console/retention"


@pytest.fixture(scope="module")
def seeded(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("records")
    url, seeded = seeded_database(directory, postgres, requests=24)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def closed(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, str]]:
    """An installation with a closed month, and that month's page."""
    directory = tmp_path_factory.mktemp("archives")
    month = make_month(Databases("sqlite", directory, postgres).make())
    seal_hours_without_receipts(month.url)
    with installed(directory / "home", month.url, valkey, close_months=False) as made:
        yield made, f"{ARCHIVES}/2026-03"


def seal_hours_without_receipts(url: str) -> None:
    """Seal all hours like their first; the gateway would do it while pages are visited."""
    database = Database(url)
    with database.transaction() as connection:
        assert build_due(connection, datetime.now(UTC), limit=1) == 1
        newest = select(usage_hours).order_by(usage_hours.c.hour.desc()).limit(1)
        sealed = dict(connection.execute(newest).mappings().one())
        assert sealed["rows"] == 0
        hours = (datetime.now(UTC) - sealed["hour"]) // HOUR
        others = [{**sealed, "hour": sealed["hour"] + n * HOUR} for n in range(1, hours)]
        connection.execute(insert(usage_hours), others)
    database.dispose()


def metadata_of(installation: Installation, request_id: str) -> object:
    with installation.database.transaction() as connection:
        query = select(receipts.c["metadata"]).where(receipts.c.request_id == request_id)
        return connection.execute(query).scalar_one()


def done(browser: Browser, location: str) -> str:
    return " ".join(browser.finished(location).split())


def test_request_is_erased_after_a_summary_and_a_proof(
    seeded: tuple[Installation, Seeded],
) -> None:
    installation, made = seeded
    operator, auditor = installation.visitor("operator"), installation.visitor("auditor")
    request_id = made.requests["atlas"][0]
    assert "Nothing has been erased." in operator.get(ERASURES).text

    summary = operator.post(ERASURES, {"request": request_id})
    assert "This is erased" in summary.text
    assert re.search(r"<li>[1-9]\d* receipts</li>", summary.text)
    assert metadata_of(installation, request_id)
    assert installation.events(act="erasure.run") == []

    sent = {"request": request_id, "reason": "asked by mail"}
    installation.forget_last_proof()
    operator = installation.visitor("operator")
    late = datetime.now(UTC) - timedelta(hours=1)
    installation.execute(update(sessions).values(proved_at=late))
    asked = operator.post(f"{ERASURES}/run", sent)
    assert asked.headers["location"].startswith("/console/prove")
    assert metadata_of(installation, request_id)

    operator = installation.visitor("operator")
    begun = operator.post(f"{ERASURES}/run", sent)
    assert begun.status_code == 303
    assert "Erased" in done(operator, begun.headers["location"])
    assert not metadata_of(installation, request_id)
    (event,) = installation.events(act="erasure.run")
    assert (event.subject, event.reason) == (f"request {request_id}", "asked by mail")
    assert event.actor.startswith("user ")
    auditor = installation.visitor("auditor")
    assert "asked by mail" in auditor.get(ERASURES).text
    assert auditor.post(ERASURES, {"request": request_id}).status_code == 404
    for role in ("finance", "owner"):
        assert installation.visitor(role).get(ERASURES).status_code == 404


def test_what_is_in_use_or_unknown_is_refused_before_anything_is_erased(
    seeded: tuple[Installation, Seeded],
) -> None:
    installation, made = seeded
    operator = installation.visitor("operator")
    for sent, status in (
        ({}, 400),
        ({"account": "atlas"}, 409),
        ({"account": HOSTILE}, 404),
        ({"request": "req_" + "0" * 32}, 404),
        ({"request": made.requests["atlas"][-1]}, 409),
        ({"tag": HOSTILE.replace("=", "")}, 400),
    ):
        for path in (ERASURES, f"{ERASURES}/run"):
            answer = operator.post(path, sent)
            assert answer.status_code == status, (sent, answer.text)
            assert HOSTILE not in answer.text
    assert len(installation.events(act="erasure.run")) <= 1


def test_closed_account_and_a_tag_are_erased(seeded: tuple[Installation, Seeded]) -> None:
    installation, _ = seeded
    operator = installation.visitor("operator")
    tag = {"tag": "project=nightly", "account": "zenith", "reason": "left"}
    assert "project=nightly" in operator.post(ERASURES, tag).text
    location = operator.post(f"{ERASURES}/run", tag).headers["location"]
    assert "nightly" not in location
    assert digest_of("zenith", None, "project=nightly") not in location
    assert "Erased" in done(operator, location)
    with installation.database.transaction() as connection:
        gone = create_account(connection, f"gone{HOSTILE}")
    of = f"/console/accounts/{gone.id}"
    assert operator.post(of, {"status": "closed"}).status_code == 303
    sent = {"account": f"id:{gone.id}", "reason": "left"}
    assert "This is erased" in operator.post(ERASURES, sent).text
    assert "Erased" in done(operator, operator.post(f"{ERASURES}/run", sent).headers["location"])
    assert HOSTILE not in operator.get(ERASURES).text


def test_month_is_archived_verified_and_restored(closed: tuple[Installation, str]) -> None:
    installation, path = closed
    operator, auditor = installation.visitor("operator"), installation.visitor("auditor")
    assert "No month is archived" in operator.get(ARCHIVES).text
    assert "Archive 2026-03" in operator.get(path).text
    assert "Archive 2026-03" not in auditor.get(path).text
    assert auditor.post(path, {"do": "write"}).status_code == 404
    assert operator.post(path, {"do": "burn"}).status_code == 400

    assert operator.post(path, {"do": "write", "reason": "small disk"}).status_code == 303
    shown = done(operator, path)
    assert "2026-03 is archived" in shown
    assert operator.post(path, {"do": "verify"}).status_code == 303
    assert "The files are right" in done(operator, path)
    assert "1 month archived" in auditor.get(ARCHIVES).text

    assert operator.post(path, {"do": "restore", "reason": "audit"}).status_code == 303
    assert "2026-03 is in the database" in done(operator, path)
    acts = [(e.act, e.reason) for e in installation.events() if e.act.startswith("period.")]
    assert acts[:3] == [
        ("period.restore", "audit"), ("period.archive", "small disk"),
        ("period.archive", "small disk"),
    ]  # fmt: skip
    assert operator.post(path, {"do": "restore"}).status_code == 303
    assert "2026-03 is not archived" in done(operator, path)


def test_archiving_and_restoring_ask_for_a_proof(closed: tuple[Installation, str]) -> None:
    installation, path = closed
    finance = installation.visitor("finance")
    installation.forget_last_proof()
    for act in ("write", "restore"):
        answer = finance.post(path, {"do": act})
        assert answer.headers["location"].startswith("/console/prove")
    assert finance.get(f"{ARCHIVES}/2019-01").status_code == 404
    assert finance.get(f"{ARCHIVES}/nothing").status_code == 400


def test_retention_is_shown_and_cleared_now(seeded: tuple[Installation, Seeded]) -> None:
    installation, _ = seeded
    operator, finance = installation.visitor("operator"), installation.visitor("finance")
    shown = words_of(finance, RETENTION)
    assert "TOLLGATE_OUTPUT_RETENTION_HOURS" in shown
    assert "Clear what is due" not in shown
    assert "Would go now" in shown
    assert finance.post(RETENTION).status_code == 404
    page = {row.cells[0]: row.labelled for row in rows_of(finance.get(RETENTION).text)}
    secret, _ = installation.key(scopes=("admin",), role="auditor")
    headers = {"Authorization": f"Bearer {secret}"}
    answer = installation.client.get("/v1/admin/retention", headers=headers)
    listed = {row["kind"].replace("_", " "): row for row in answer.json()["data"]}
    assert listed.keys() == page.keys()
    for kind, row in listed.items():
        due = "\N{EN DASH}" if row["due"] is None else str(row["due"])
        assert page[kind]["Would go now"] == due, kind

    assert operator.post(RETENTION, {"reason": "full disk"}).status_code == 303
    assert "Cleared" in done(operator, RETENTION)
    (event,) = installation.events(act="retention.run")
    assert (event.reason, event.after is not None) == ("full disk", True)
