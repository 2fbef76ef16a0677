"""Every page: who sees it, that it shows what users wrote as text, and what its forms do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from urllib.parse import urlencode

import pytest
from sqlalchemy import update

from gateway.accounts.accounts import Account, find_account
from gateway.accounts.budgets import change_budget, create_budget
from gateway.accounts.keys import create_key, find_key, key_by_id
from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.billing.proof import check_books
from gateway.billing.reconciliation import last_reconciliation
from gateway.console.pages import limits
from gateway.ledger.refunds import refunds_of
from gateway.pricing import format_usd
from gateway.tables.core import keys
from tests.console.seeding import HOSTILE, Seeded, Seeder, seeded_database
from tests.console.visiting import Browser, Installation, installed
from tests.stack import PEPPER, wait_for
from workers.contract.jobs import RequestId

PAGES = (
    "/console/requests",
    "/console/requests/{last}",
    "/console/requests/{open}",
    "/console/failures",
    "/console/models",
    "/console/models/echo",
    "/console/speed/echo",
    "/console/pick",
    "/console/compare?model=echo&model=Veo3",
    "/console/docs?q=chat",
    "/console/balance?account=atlas",
    "/console/ledger?account=atlas",
    "/console/usage?by=model",
    "/console/statements?account=atlas",
    "/console/limits?account=atlas",
    "/console/accounts/{atlas}",
)
KEYS = "/console/keys"
INSTALLATION = (
    "/console",
    "/console/accounts",
    "/console/margins",
    "/console/ledger",
    "/console/prices",
    "/console/prices/echo",
)
FILE = ("/console/catalog", "/console/plan?model=sdxl")
MONEY = re.compile(r"\N{MINUS SIGN}?\$[0-9][0-9\N{NARROW NO-BREAK SPACE}]*(\.[0-9]{1,9})?")


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    """An installation with a week of traffic of two accounts."""
    directory = tmp_path_factory.mktemp("pages")
    url, seeded = seeded_database(directory, postgres)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


@pytest.fixture(scope="module")
def visitors(filled: tuple[Installation, Seeded]) -> dict[str, Browser]:
    """A browser of each role; members are those of atlas."""
    return {role: filled[0].visitor(role, account="atlas") for role in (*ROLES, *MEMBER_ROLES)}


def path_of(path: str, seeded: Seeded) -> str:
    mine = seeded.requests["atlas"]
    return path.format(last=mine[-3], open=mine[-1], atlas=seeded.accounts["atlas"].id)


def account(installation: Installation, name: str) -> Account:
    with installation.database.transaction() as connection:
        return find_account(connection, name)


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", html))


@pytest.mark.parametrize("path", PAGES)
def test_page_is_shown_to_all_roles_of_its_account(
    path: str, filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    for role, browser in visitors.items():
        answer = browser.get(path_of(path, filled[1]))
        assert answer.status_code == 200, f"{role}: {answer.status_code}"
        assert HOSTILE not in answer.text
        assert "no-cache" in answer.headers["cache-control"]


def test_finance_sees_no_keys(visitors: dict[str, Browser]) -> None:
    for role, browser in visitors.items():
        page = browser.get("/console/models").text
        status = 404 if role == "finance" else 200
        assert browser.get(KEYS).status_code == status
        assert (f'href="{KEYS}"' in page) == (status == 200)


@pytest.mark.parametrize("path", [*INSTALLATION, *FILE])
def test_pages_of_the_installation_do_not_exist_for_members(
    path: str, visitors: dict[str, Browser]
) -> None:
    for role in ROLES:
        assert visitors[role].get(path).status_code == 200
    if path not in ("/console", "/console/ledger"):
        for role in MEMBER_ROLES:
            assert visitors[role].get(path).status_code == 404


def test_first_page_of_members_is_their_home(visitors: dict[str, Browser]) -> None:
    answer = visitors["viewer"].get("/console")

    assert answer.headers["location"] == "/console/home"
    assert "atlas has $" in visitors["viewer"].get("/console/home").text


def test_what_users_wrote_is_text_everywhere(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    hostile = filled[1].accounts["hostile"]

    for path in ("/console/accounts", "/console/keys", f"/console/accounts/{hostile.id}"):
        answer = visitors["operator"].get(path)
        assert HOSTILE not in answer.text
        assert HOSTILE in text_of(answer.text)


def test_another_account_does_not_exist(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    seeded = filled[1]
    theirs = seeded.requests["zenith"][0]
    paths = (
        f"/console/requests/{theirs}",
        f"/console/keys/{seeded.keys['main'].id}",
        f"/console/accounts/{seeded.accounts['zenith'].id}",
        "/console/balance?account=zenith",
        "/console/requests?account=zenith",
    )

    for path in paths:
        assert visitors["owner"].get(path).status_code == 404, path


def test_contents_are_shown_to_the_people_of_the_account_only(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    path = f"/console/requests/{filled[1].requests['atlas'][-3]}"

    for role, browser in visitors.items():
        seen = "A queue holds what waits." in browser.get(path).text
        assert seen == (role in MEMBER_ROLES)


def test_receipt_lines_sum_to_the_charge_and_lead_to_the_transfer(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    browser = visitors["owner"]
    html = browser.get(f"/console/requests/{filled[1].requests['atlas'][-3]}").text

    assert "= sum of the lines, exact" in html
    transfer = re.search(r'href="(/console/ledger/\d+[^"]*)"', html)
    assert transfer is not None
    entry = browser.get(unescape(transfer[1])).text
    assert "= sum of the charges, exact" in entry


def test_money_is_never_rounded(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    for path in ("/console", "/console/accounts", "/console/usage", "/console/margins"):
        text = text_of(visitors["operator"].get(path).text)
        for found in re.findall(r"\S*\$\S*[0-9]\S*", text):
            assert MONEY.match(found), f"{path}: {found}"
    atlas = account(filled[0], "atlas")
    assert f"${format_usd(atlas.available_nanos)}" in visitors["owner"].get("/console/home").text


def test_lists_go_on_where_they_ended(visitors: dict[str, Browser]) -> None:
    browser = visitors["operator"]
    link = re.compile(r'href="/console/requests/(req_[0-9a-f]+)"')
    first = browser.get("/console/requests").text
    older = re.search(r'href="([^"]+)" data-shortcut="\]"', first)
    assert older is not None

    second = browser.get(unescape(older[1])).text

    ids = [*link.findall(first), *link.findall(second)]
    assert len(ids) == len(set(ids)) == 100
    assert ids == sorted(ids, reverse=True)


def test_filters_are_in_the_address(visitors: dict[str, Browser]) -> None:
    browser = visitors["operator"]

    found = browser.get("/console/requests?status=failed&model=&task=").text

    assert "failed" in text_of(found)
    assert "succeeded</span>" not in found
    assert browser.get("/console/requests?status=nonsense").status_code == 400
    assert "No request fits" in browser.get("/console/requests?model=nothing").text


def test_empty_pages_say_what_would_be_there(filled: tuple[Installation, Seeded]) -> None:
    owner = filled[0].visitor("owner", account="other")

    assert "No request yet" in owner.get("/console/requests").text
    assert "No credit yet" in owner.get("/console/balance").text
    assert "Nothing is booked" in owner.get("/console/ledger").text
    assert "There is no key yet" in owner.get("/console/keys").text
    assert "Nothing was booked" in owner.get("/console/usage").text
    assert "Nothing of other failed" in owner.get("/console/failures").text


def test_key_is_created_rotated_and_revoked(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    owner = installation.visitor("owner", account="atlas")

    made = owner.post(
        "/console/keys/new",
        {"name": "web 2", "inference": "yes", "read": "yes", "spend_limit": "2.50",
         "requests_per_minute": "60"},
    )  # fmt: skip

    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    secret = re.search(r'<code id="secret">(tg_[^<]+)</code>', made.text)
    assert secret is not None
    with installation.database.transaction() as connection:
        key = find_key(connection, secret[1])
    assert key.spend_limit_nanos == 2_500_000_000
    page = owner.get(f"/console/keys/{key.id}").text
    assert secret[1] not in page
    assert "60 requests a minute" in page
    assert "60 requests a minute" in owner.get("/console/keys").text

    form = owner.get("/console/keys/new").text
    once = re.search(r'name="once" value="(\w+)"', form)
    assert once is not None
    sent = {"name": "once", "read": "yes", "once": once[1]}
    answers = [owner.post("/console/keys/new", sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 303]

    renamed = owner.post(f"/console/keys/{key.id}", {"name": "web 3", "spend_limit": ""})
    assert renamed.status_code == 303
    rotated = owner.post(f"/console/keys/{key.id}/rotate", {"overlap_s": "3600"})
    assert rotated.status_code == 201
    assert owner.post(f"/console/keys/{key.id}/revoke").status_code == 303

    subject = f"key {key.id}"
    acts = [event.act for event in installation.events(subject=subject)]
    assert acts == ["key.revoke", "key.rotate", "key.change", "key.create"]


def test_key_that_is_saved_with_its_day_expires_at_the_same_moment(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, seeded = filled
    owner, ends = (
        installation.visitor("owner", account="atlas"),
        datetime(2031, 5, 3, 7, 30, tzinfo=UTC),
    )
    with installation.database.transaction() as connection:
        _, key = create_key(
            connection, seeded.accounts["atlas"].id, pepper=PEPPER.encode(), expires_at=ends
        )

    def saved(day: str) -> datetime | None:
        answer = owner.post(f"/console/keys/{key.id}", {"name": "until", "expires_at": day})
        assert answer.status_code == 303
        with installation.database.transaction() as connection:
            return key_by_id(connection, key.id).expires_at

    assert 'value="2031-05-03"' in owner.get(f"/console/keys/{key.id}").text
    assert saved("2031-05-03") == ends
    assert saved("2031-05-04") == datetime(2031, 5, 4, 23, 59, 59, tzinfo=UTC)
    assert saved("") is None


@pytest.mark.parametrize("act", ["", "/rotate", "/revoke"])
def test_keys_of_administrators_wait_for_a_proof(
    filled: tuple[Installation, Seeded], act: str
) -> None:
    installation, seeded = filled
    account_id, scopes = seeded.accounts["atlas"].id, ("inference", "read", "admin")
    with installation.database.transaction() as connection:
        _, key = create_key(connection, account_id, pepper=PEPPER.encode(), scopes=scopes)
        _, plain = create_key(connection, account_id, pepper=PEPPER.encode())
    operator = installation.visitor("operator")
    installation.forget_last_proof()

    away = operator.post(f"/console/keys/{key.id}{act}", {"name": "changed"})
    done = operator.post(f"/console/keys/{plain.id}{act}", {"name": "changed"})

    assert (away.status_code, away.headers["location"]) == (303, "/console/prove")
    assert done.status_code in (201, 303)
    assert done.headers.get("location") != "/console/prove"
    assert [event.act for event in installation.events(subject=f"key {key.id}")] == []


def test_audit_log_shows_acts_with_what_they_changed(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    operator = visitors["operator"]
    opened = operator.post("/console/accounts/new", {"name": "vega"}).headers["location"]
    operator.post(opened, {"credit_limit": "7", "reason": "a friend"})

    page = operator.get("/console/audit?act=account.change&account=vega").text

    assert "a friend" in page
    assert "<del>0</del>" in page
    assert "<ins>7</ins>" in page
    assert visitors["owner"].get("/console/audit").status_code == 200
    assert "vega" not in text_of(visitors["owner"].get("/console/audit").text)
    assert visitors["viewer"].get("/console/audit").status_code == 404


def test_audit_log_is_filtered_by_each_of_its_fields(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, _ = filled
    operator = installation.visitor("operator")
    opened = operator.post("/console/accounts/new", {"name": "lyra"}).headers["location"]
    operator.post(opened, {"credit_limit": "3", "reason": "a filter"})
    event = installation.events(act="account.change")[0]
    today, later = f"{event.at:%Y-%m-%d}", f"{event.at + timedelta(days=2):%Y-%m-%d}"

    for name, fits, other in (
        ("act", "account.change", "key.create"),
        ("actor", event.actor, "somebody else"),
        ("subject", event.subject, "account 999999"),
        ("call", event.call_id, "call_other"),
        ("account", "lyra", "zenith"),
        ("from", today, later),
        ("to", later, "2020-01-01"),
    ):
        assert "a filter" in operator.get(f"/console/audit?{urlencode({name: fits})}").text, name
        found = operator.get(f"/console/audit?{urlencode({name: other})}").text
        assert "a filter" not in found, name
    # What one call did leads to all of it.
    page = operator.get(f"/console/audit?subject={event.subject}").text
    assert f'href="/console/audit?call={event.call_id}"' in page


def test_rotated_keys_both_work_until_the_first_ends(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    owner = installation.visitor("owner", account="atlas")
    with installation.database.transaction() as connection:
        old, key = create_key(connection, seeded.accounts["atlas"].id, pepper=PEPPER.encode())

    page = owner.post(f"/console/keys/{key.id}/rotate", {"overlap_s": "3600"}).text

    found = re.search(r'<code id="secret">(tg_[^<]+)</code>', page)
    assert found is not None

    def works(secret: str) -> bool:
        headers = {"Authorization": f"Bearer {secret}"}
        return bool(installation.client.get("/v1/models", headers=headers).status_code == 200)

    assert (works(old), works(found[1])) == (True, True)
    assert "Replaced by" in text_of(owner.get(f"/console/keys/{key.id}").text)
    ended = update(keys).where(keys.c.id == key.id).values(expires_at=datetime.now(UTC))
    installation.execute(ended)
    # A gateway knows a key for some seconds.
    wait_for(lambda: not works(old), "the end of the old key")
    assert works(found[1])
    assert "expired" in owner.get(f"/console/keys/{key.id}").text


def test_hard_budget_that_is_used_up_says_so_and_when_it_begins_again(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, seeded = filled
    owner, atlas = installation.visitor("owner", account="atlas"), seeded.accounts["atlas"].id
    with installation.database.transaction() as connection:
        made = [
            create_budget(
                connection, atlas, 10**9, window="day", name=f"hard {hard}", hard=hard,
                now=datetime.now(UTC) - timedelta(days=1),
            )
            for hard in (True, False)
        ]  # fmt: skip
        seeder = Seeder(connection, installation.settings.catalog, seed=3)
        seeder.requests(seeded.accounts["atlas"], seeded.keys["web"], 5)
        for each in made:
            change_budget(connection, each.id, limit_nanos=1)

    page = owner.get("/console/limits").text

    rows = {row.partition(" <small>")[0]: row for row in page.split('<th scope="row">')}
    assert '<span class="state bad"><i aria-hidden="true">✕</i>used up</span>' in rows["hard True"]
    assert '<span class="state warn">' in rows["hard False"]
    assert re.search(r'data-label="Resets">in [\w ]+<small>', rows["hard True"])


def test_front_page_greets_browsers_and_clients(filled: tuple[Installation, Seeded]) -> None:
    browser = filled[0].browser()

    page = browser.get("/", Accept="text/html,*/*;q=0.8")
    answer = browser.get("/", Accept="*/*")

    assert 'href="/console"' in page.text
    assert answer.json()["console"] == "/console"


def test_budget_is_created_changed_and_ended(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    installation, seeded = filled
    key = str(seeded.keys["web"].id)
    owner, finance = visitors["owner"], visitors["finance"]
    whole = {"name": "whole", "limit": "9", "window": "month", "hard": "yes"}

    assert owner.post("/console/limits", whole).status_code == 400
    assert owner.post("/console/limits", {**whole, "key": key}).status_code == 303
    assert finance.post("/console/limits?account=atlas", whole).status_code == 303

    made = [event for event in installation.events(act="budget.create") if event.account_id]
    whole_id, key_id = (event.subject.split()[1] for event in made[:2])
    changed = {"limit": "10"}
    assert owner.post(f"/console/limits/{whole_id}", changed).status_code == 404
    assert owner.post(f"/console/limits/{key_id}", changed).status_code == 303
    assert owner.post(f"/console/limits/{key_id}/end").status_code == 303
    assert finance.post(f"/console/limits/{whole_id}/end?account=zenith").status_code == 404
    assert finance.post(f"/console/limits/{whole_id}/end?account=atlas").status_code == 303
    assert visitors["viewer"].post(f"/console/limits/{key_id}", changed).status_code == 404


def test_mistake_in_a_form_keeps_what_was_entered(filled: tuple[Installation, Seeded]) -> None:
    owner = filled[0].visitor("owner", account="atlas")

    answer = owner.post("/console/keys/new", {"name": "web", "read": "yes", "concurrent": "many"})

    assert answer.status_code == 400
    assert 'value="web"' in answer.text
    assert 'id="problem-concurrent"' in answer.text
    assert 'aria-invalid="true"' in answer.text


def test_viewer_and_finance_manage_no_keys(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    for role in ("viewer", "member", "finance", "auditor"):
        assert visitors[role].get("/console/keys/new?account=atlas").status_code == 404
        assert visitors[role].post("/console/keys/new", {"read": "yes"}).status_code == 404


def test_refund_is_booked_once_however_often_it_is_sent(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    installation, seeded = filled
    request_id = seeded.requests["atlas"][-3]
    path = f"/console/requests/{request_id}/refund"
    form = visitors["finance"].get(path).text
    reference = re.search(r'name="reference" value="(\w+)"', form)
    assert reference is not None
    sent = {"amount": "0.000000002", "reason": "too slow", "reference": reference[1]}

    answers = [visitors["finance"].post(path, sent) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [303, 303]
    with installation.database.transaction() as connection:
        found = refunds_of(connection, RequestId(request_id))
        assert check_books(connection, now=datetime.now(UTC)) == []
    assert [refund.amount_nanos for refund in found] == [2]
    assert len(installation.events(act="credit.refund")) == 1
    too_much = visitors["finance"].post(path, {**sent, "amount": "9", "reference": "other"})
    assert too_much.status_code >= 400
    assert visitors["auditor"].post(path, sent).status_code == 404


def test_account_is_opened_changed_and_credited(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    operator = visitors["operator"]

    opened = operator.post("/console/accounts/new", {"name": "nova", "credit_limit": "1"})
    path = opened.headers["location"]
    operator.post(path, {"credit_limit": "2", "reason": "grew"})
    visitors["finance"].post(path, {"allowance": "3", "status": "closed"})
    credited = operator.post(
        "/console/credit/new?account=nova",
        {"kind": "grant", "amount": "0.5", "reason": "welcome", "reference": "w-1"},
    )

    nova = account(filled[0], "nova")
    assert credited.status_code == 303
    assert (nova.posted_nanos, nova.credit_limit_nanos) == (500_000_000, 2_000_000_000)
    assert (nova.allowance_nanos, nova.status) == (3_000_000_000, "active")
    twice = operator.post("/console/accounts/new", {"name": "nova"})
    assert twice.status_code >= 400
    assert "nova" in twice.text
    assert visitors["auditor"].post(path, {"credit_limit": "9"}).status_code == 404


def test_books_are_proved_on_demand(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    assert visitors["auditor"].post("/console/ledger/prove").status_code == 404

    assert visitors["finance"].post("/console/ledger/prove").status_code == 303
    visitors["finance"].finished("/console/ledger")

    with filled[0].database.transaction() as connection:
        proof = last_reconciliation(connection)
    assert proof is not None
    assert proof.findings == ()
    assert "R1–R14 agree" in visitors["viewer"].get("/console/ledger").text  # noqa: RUF001


def test_report_is_downloaded_as_it_is_shown(visitors: dict[str, Browser]) -> None:
    answer = visitors["owner"].get("/console/usage?by=model&format=csv")

    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = answer.text.splitlines()
    assert head.startswith("model,requests,cost,refunded,net_cost")
    models = {row.partition(",")[0] for row in rows}
    assert models <= {"echo", "slow", "brief", "Veo3"}
    assert "echo" in models


def test_picker_gives_its_reasons(visitors: dict[str, Browser]) -> None:
    assert "No model is described by" in visitors["owner"].get("/console/pick?q=unicorns").text
    found = visitors["owner"].get("/console/pick?task=text-generation")
    assert found.status_code == 200
    assert "Best fit" in found.text


def test_request_tells_its_key_its_events_and_gives_its_output_as_a_file(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    installation, seeded = filled
    request_id = next(
        each
        for each in reversed(seeded.requests["atlas"])
        if 'made">' in (page := visitors["owner"].get(f"/console/requests/{each}").text)
        and '/output" download' in page
    )
    path = f"/console/requests/{request_id}"
    page = visitors["owner"].get(path).text

    assert f'href="/console/keys/{seeded.keys["web"].id}"' in page
    events = page.partition('id="events"')[2].partition("</section>")[0]
    words = ("accepted", "queued", "started", "first output", "settled: succeeded")
    places = [events.index(f">{each}<") for each in words]
    assert places == sorted(places)
    assert "attempt 1" in events
    assert "in force from" in page
    output = visitors["viewer"].get(f"{path}/output")
    assert output.json()["choices"][0]["finish_reason"] == "stop"
    assert "attachment" in output.headers["content-disposition"]
    for role in ROLES:
        assert visitors[role].get(f"{path}/output").status_code == 404
    stranger = installation.visitor("owner", account="zenith")
    assert stranger.get(f"{path}/output").status_code == 404


def test_cancelling_says_first_what_it_does(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    _, seeded = filled
    path = f"/console/requests/{seeded.requests['atlas'][-2]}"

    def offered(role: str) -> list[str]:
        return re.findall(r'href="([^"]*)">Cancel…', visitors[role].get(path).text)

    assert offered("member") == [f"{path}/cancel"]
    assert offered("operator") == [path.replace("requests", "queue/cancel")]
    assert offered("viewer") == offered("auditor") == []
    for role in ("member", "operator"):
        page = visitors[role].get(offered(role)[0]).text
        assert "What this will do" in page
        assert "is released to atlas" in page or "released to atlas" in page
    assert visitors["viewer"].get(f"{path}/cancel").status_code == 404


def test_open_request_is_cancelled(
    filled: tuple[Installation, Seeded], visitors: dict[str, Browser]
) -> None:
    path = f"/console/requests/{filled[1].requests['atlas'][-2]}"

    assert visitors["viewer"].post(f"{path}/cancel").status_code == 404
    assert visitors["member"].post(f"{path}/cancel").status_code == 303


def test_statement_is_printed(visitors: dict[str, Browser]) -> None:
    html = visitors["owner"].get("/console/statements").text
    month = re.search(r"/console/statements/(\d{4}-\d\d)\.pdf", html)
    assert month is not None

    assert visitors["owner"].get(f"/console/statements/{month[1]}").status_code == 200
    printed = visitors["owner"].get(f"/console/statements/{month[1]}.html")
    assert printed.headers["content-type"].startswith("text/html")


def test_failed_part_is_answered_with_a_part_and_not_with_a_page(
    installation: Installation,
) -> None:
    browser = installation.visitor("owner")

    part = browser.get("/console/speed/nothing", **{"HX-Request": "true"})
    followed = browser.get(
        "/console/speed/nothing", **{"HX-Request": "true", "Tollgate-Follows": "1"}
    )

    assert part.status_code == 404
    assert part.headers["HX-Reselect"] == ".part-failed"
    assert part.headers["HX-Reswap"] == "afterbegin"
    assert "<html" not in part.text
    assert "Try again" in part.text
    assert followed.headers["HX-Reswap"] == "none"


def test_unexpected_error_is_found_in_the_log_by_what_its_page_says(
    installation: Installation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = installation.visitor("owner")
    monkeypatch.setattr(limits, "limit_rows", None)

    page = browser.get("/console/limits")

    assert page.status_code == 500
    found = re.search(r"<code>(call_\w+)</code> identifies this call", page.text)
    assert found is not None
    assert f"unexpected error at GET /console/limits ({found[1]})" in caplog.text
