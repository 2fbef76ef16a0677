"""Setting prices, trying them on the past, and corrections: summary first, then the act."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import func, select, update

from gateway.billing.proof import check_books
from gateway.billing.usage.report import Filters, Span, usage
from gateway.billing.usage.whatif import whatif
from gateway.console.jobs import store
from gateway.console.jobs.runner import ConsoleJobs, JobCancelled, Progress
from gateway.console.jobs.store import NewJob
from gateway.ledger.prices import price_periods_of
from gateway.pricing import Component, Price, format_usd
from gateway.tables.core import accounts, price_periods, receipts, refunds
from gateway.tables.users import console_jobs
from tests.console.seeding import Seeded, seeded_database
from tests.console.visiting import Browser, Installation, installed
from tests.stack import wait_for

LINES = [
    ("unit", "input_token"), ("amount", "0.01"), ("per", "1000000"), ("when", ""),
    ("unit", "output_token"), ("amount", "0.05"), ("per", "1,000,000"), ("when", ""),
]  # fmt: skip
CHEAP = Price(
    (Component("input_token", 10_000_000, 1_000_000), Component("output_token", 50_000_000, 10**6))
)


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("prices")
    url, seeded = seeded_database(directory, postgres)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def finance(filled: tuple[Installation, Seeded]) -> Browser:
    return filled[0].visitor("finance")


def text_of(html: str) -> str:
    """Return the text of a page, with amounts in one piece."""
    joined = re.sub(r"</?(b|span)\b[^>]*>", "", html)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", joined)))


def entered(**more: str) -> list[tuple[str, str]]:
    return [*LINES, *more.items()]


def periods(installation: Installation, model: str) -> list[tuple[int, bool]]:
    with installation.database.transaction() as connection:
        found = price_periods_of(connection, model=model)
    return [(each.account_id, each.cancelled is not None) for each in found]


def test_list_has_the_margins_of_the_report(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    now = datetime.now(UTC)
    with filled[0].database.transaction() as connection:
        groups = usage(
            connection,
            Span(now - timedelta(days=30), now, ZoneInfo("UTC")),
            ["model"],
            Filters(),
        )
    page = text_of(finance.get("/console/prices").text)

    for group in groups:
        assert format_usd(group.cost_nanos - group.refund_nanos) in page
    below = text_of(finance.get("/console/prices/below-cost").text)
    assert "requests sold below cost" in below
    assert "echo : " in below
    assert "Veo3" not in below


def test_price_is_tried_on_the_past_with_the_figures_of_the_api(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, _ = filled
    query = urlencode(entered(do="look"))
    shown = text_of(finance.get(f"/console/prices/echo?{query}").text)
    assert "$0.08 / 1" in shown
    assert "A usual request" in shown

    started = finance.post("/console/prices/echo", dict_of(entered(do="try")))
    page = text_of(finance.finished(started.headers["location"]))

    done = installation.execute(select(console_jobs.c.result)).scalar_one()
    starts_at, ends_at = (datetime.fromisoformat(done[name]) for name in ("starts_at", "ends_at"))
    with installation.database.transaction() as connection:
        (found,) = whatif(
            connection, {"echo": CHEAP}, starts_at=starts_at, ends_at=ends_at, model="echo"
        )
    assert found.requests
    assert f"{found.requests} charged requests" in page
    assert format_usd(found.charged_nanos) in page
    assert format_usd(found.repriced_nanos) in page
    again = finance.post("/console/prices/echo", dict_of(entered(do="try")))
    assert again.headers["location"] == started.headers["location"]


def dict_of(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def timeless(text: str) -> str:
    return re.sub(r"\d+ (s|min|h) ago", "", text)


def test_price_begins_later_and_old_requests_keep_theirs(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, seeded = filled
    starts = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%S")
    fields = entered(reason="a new contract", **{"from": starts})
    receipt = f"/console/requests/{seeded.requests['atlas'][-3]}"
    before = text_of(finance.get(receipt).text)

    review = finance.get(f"/console/prices/slow?{urlencode([*fields, ('do', 'review')])}")
    assert review.status_code == 200
    assert "Put it in force" in review.text
    assert periods(installation, "slow") == [(0, False)]

    done = finance.post("/console/prices/slow", dict_of([*fields, ("do", "set")]))
    assert done.status_code == 303
    page = text_of(finance.get("/console/prices/slow").text)
    assert "begins later" in page
    assert "a new contract" in page
    # Each process reads new prices once a second.
    wait_for(
        lambda: (
            re.search(r"in [0-4] min", text_of(finance.get("/console/prices").text)) is not None
        ),
        "the start of the price",
    )
    assert timeless(text_of(finance.get(receipt).text)) == timeless(before)
    (event,) = installation.events(act="price.set")
    assert event.after is not None
    assert event.after["price"][0]["amount"] == "0.01"

    twice = finance.post("/console/prices/slow", dict_of([*fields, ("do", "set")]))
    assert twice.status_code == 409
    assert 'id="problem-from"' in twice.text

    first = re.search(r'name="from" value="(20[^"]+)"', finance.get("/console/prices/slow").text)
    assert first is not None
    sent = {"do": "cancel", "from": first[1], "reason": "a mistake"}
    assert finance.post("/console/prices/slow", sent).status_code == 303
    assert (0, True) in periods(installation, "slow")


def test_receipt_shows_no_price_of_another_account(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, seeded = filled
    request_id = seeded.requests["atlas"][-3]
    receipt = f"/console/requests/{request_id}"
    before = timeless(text_of(finance.get(receipt).text))
    used = receipts.c.model, receipts.c.price_id, receipts.c.accepted_at
    row = installation.execute(select(*used).where(receipts.c.request_id == request_id)).one()
    own = price_periods.insert().values(
        model=row.model,
        account_id=seeded.accounts["zenith"].id,
        effective_from=row.accepted_at - timedelta(seconds=1),
        price_id=row.price_id,
        source="operator",
    )

    installation.execute(own)

    assert " in force from " in before
    assert timeless(text_of(finance.get(receipt).text)) == before


def test_own_price_is_set_and_ended(filled: tuple[Installation, Seeded], finance: Browser) -> None:
    installation, _ = filled
    fields = entered(account="atlas", reason="a friend", do="set")

    assert finance.post("/console/prices/brief", dict_of(fields)).status_code == 303
    atlas = installation.execute(select(accounts.c.id).where(accounts.c.name == "atlas")).scalar()
    assert periods(installation, "brief") == [(0, False), (atlas, False)]

    ended = {"account": "atlas", "kind": "end", "reason": "it ended", "do": "set"}
    later = (datetime.now(UTC) + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%S")
    assert finance.post("/console/prices/brief", {**ended, "from": later}).status_code == 303
    assert "own price ends" in text_of(finance.get("/console/prices/brief").text)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"amount": "dear"}, "price"),
        ({"unit": "image"}, "price"),
        ({"when": "high"}, "price"),
        ({"from": "soon"}, "from"),
        ({"from": "2020-01-01T00:00"}, "from"),
        ({"reason": ""}, "reason"),
    ],
)
def test_mistake_is_beside_its_field(finance: Browser, changes: dict[str, str], param: str) -> None:
    one = {"unit": "request", "amount": "0.1", "per": "", "when": "", "reason": "x", **changes}

    answer = finance.get(f"/console/prices/echo?{urlencode({**one, 'do': 'review'})}")

    assert answer.status_code == 400
    assert f'id="problem-{param}"' in answer.text


def test_prices_ask_for_a_proof_and_refuse_auditors(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    operator, auditor = installation.visitor("operator"), installation.visitor("auditor")
    fields = dict_of(entered(reason="late", do="set"))
    assert auditor.get("/console/prices/echo").status_code == 200
    assert auditor.post("/console/prices/echo", fields).status_code == 404
    assert auditor.get("/console/prices/corrections").status_code == 404

    late = installation.visitor("operator")
    installation.forget_last_proof()
    answer = late.post("/console/prices/echo", fields)

    assert answer.headers["location"].startswith("/console/prove")
    assert operator.inside


def test_correction_is_rehearsed_then_booked_once(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, _ = filled
    span = {"from": "2020-01-01T00:00", "to": "2090-01-01T00:00"}
    fields = entered(model="echo", **span)
    before = installation.execute(select(func.count()).select_from(refunds)).scalar()

    rehearsed = finance.post("/console/prices/corrections", dict_of(fields))
    page = finance.finished(rehearsed.headers["location"])
    total = re.search(r"<h1>\$([\d.]+) would be given back", page)
    assert total is not None
    assert installation.execute(select(func.count()).select_from(refunds)).scalar() == before
    listed = re.findall(r"/console/requests/(req_\w+)", page)
    assert listed
    assert len(listed) == len(set(listed))

    missing = finance.post("/console/prices/corrections/post", dict_of(fields))
    assert 'id="problem-reference"' in missing.text
    booking = dict_of([*fields, ("reference", "ticket 7"), ("reason", "it was too dear")])
    for booked in (total[1], "0"):
        posted = finance.post("/console/prices/corrections/post", booking)
        result = finance.finished(posted.headers["location"])
        assert f"<h1>${booked} was given back" in result

    with installation.database.transaction() as connection:
        assert check_books(connection, now=datetime.now(UTC)) == []
    event = installation.events(act="credit.correct")[-1]
    assert event.after is not None
    assert event.after["booked"] == total[1]
    none = finance.post("/console/prices/corrections", dict_of(fields))
    assert "Nothing would be given back" in finance.finished(none.headers["location"])


def test_job_is_cancelled_seen_by_its_act_and_lost_with_its_gateway(
    filled: tuple[Installation, Seeded], finance: Browser
) -> None:
    installation, _ = filled
    owner = installation.visitor("owner", account="atlas")
    runner: ConsoleJobs = installation.client.app.state.console_jobs
    job = NewJob("test", store.digest_of("x"), "somebody", "ledger.write", "/console/ledger")

    async def work(progress: Progress) -> None:
        for done in range(10_000):
            progress(done, 10_000)
            await asyncio.sleep(0.01)

    id = installation.client.blocking_portal.call(runner.start, job, work)
    path = f"/console/jobs/{id}"
    wait_for(lambda: " of 10" in text_of(finance.get(path).text), "the progress of the job")
    assert owner.get(path).status_code == 404
    assert finance.post(f"{path}/cancel").status_code == 404
    assert installation.visitor("operator").post(f"{path}/cancel").status_code == 303
    wait_for(lambda: finance.get(path).status_code == 303, "the end of the job")
    assert finance.get(path).headers["location"] == "/console/ledger"
    assert finance.get(path, **{"HX-Request": "true"}).headers["hx-redirect"] == "/console/ledger"
    with installation.database.transaction() as connection:
        found = store.find(connection, id)
    assert found is not None
    assert found.state == "cancelled"

    silent = datetime.now(UTC) - store.SILENT * 2
    installation.execute(
        update(console_jobs).where(console_jobs.c.id == id).values(state="running", seen_at=silent)
    )
    with installation.database.transaction() as connection:
        lost = store.find(connection, id)
    assert lost is not None
    assert lost.state == "lost"
    stopped = Progress()
    stopped.is_cancelled = True
    with pytest.raises(JobCancelled):
        stopped(1, 2)
