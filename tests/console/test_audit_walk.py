"""Every form of the console that changes something is sent: its effect is stored and shown, its act
is recorded with its author, and neither is without the other.

A form that is not in ``ACTING`` is in ``OTHERS``, with the reason why it has no act of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, text

from gateway.aside import add_note
from gateway.audit_log import AuditEvent
from gateway.catalog.reloads import digest_of
from gateway.checks.months import month_of
from gateway.notices.confirmation import confirmation_token
from gateway.sql.database import Database
from gateway.tables.core import chores, metadata, receipts
from gateway.tables.invoices import invoices
from gateway.tables.users import sessions, users
from tests.console.routes import console_routes
from tests.console.seeding import Seeder, seed
from tests.console.test_money import text_of
from tests.console.test_prices import dict_of, entered
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG, PEPPER, wait_for
from workers.contract.announcements import Announcement, ModelState, Workers
from workers.contract.redis import connect

Known = dict[str, str]
Form = Mapping[str, str] | Callable[[Known], dict[str, Any]]

READS = "it only reads: a dry run, a check, a quote or a count"
OWN = "a choice of the visitor for the own pages"
MEMBERS = "what members do with their own requests and files, as over the API"
ENTRANCE = "the entrance, which tests/console/test_entrance.py walks with its acts"
OTHERS: Mapping[str, str] = {
    "/console/batches": MEMBERS,
    "/console/batches/check": READS,
    "/console/batches/{batch_id}/cancel": MEMBERS,
    "/console/catalog/add": READS,
    "/console/catalog/check": READS,
    "/console/catalog/draft": READS,
    "/console/columns": OWN,
    "/console/csp": "browsers report what the policy blocked",
    "/console/enter/code": ENTRANCE,
    "/console/enter/key": ENTRANCE,
    "/console/enter/link": ENTRANCE,
    "/console/erasures": READS,
    "/console/files": MEMBERS,
    "/console/files/{file_id}/delete": MEMBERS,
    "/console/jobs/{job_id}/cancel": "a job has its own act once it has done something",
    "/console/payments": "needs a provider; tests/console/test_money.py pays with one",
    "/console/playground/order": MEMBERS,
    "/console/playground/quote": READS,
    "/console/playground/voices": MEMBERS,
    "/console/preferences": OWN,
    "/console/prices/corrections": READS,
    "/console/prove": ENTRANCE,
    "/console/requests/cancel": MEMBERS,
    "/console/requests/{request_id}/cancel": MEMBERS,
    "/console/requests/{request_id}/feedback": MEMBERS,
    "/console/upstreams/check": READS,
    "/console/usage/charges": READS,
    "/console/voices/{id}/delete": MEMBERS,
    "/console/voices/{id}/rename": MEMBERS,
}
ONE_SIDED = {
    "erasure.run",
    "access.ask",
    "access.decline",
    "ledger.reconcile",
    "webhook.reveal",
    "webhook.resend",
    "session.end",
    "access.end",
}
"""Acts that change no fields, so they need neither a before nor an after."""


ELSEWHERE: Mapping[str, str] = {
    "/console/workers/{worker}/{act}": "a wish for a worker, at the queue server",
    "/console/queue/requeue": "jobs, at the queue server",
    "/console/webhooks/secret": "it only shows",
    "/console/retention": "nothing is due yet",
    "/console/webhooks/{request_id}/resend": "a delivery, which gateways write by themselves",
}
"""Forms that change no row but the one of their act, and what they change instead."""
IN_STEPS: Mapping[str, str] = {
    "/console/periods/{month}": "the month is marked first; closing it again continues",
    "/console/archives/{month}": "files are written and read first; archiving again continues",
    "/console/ledger/prove": "what was proved of each account is kept, for the next proof",
}
"""Forms that work in several transactions, of which an interruption leaves the first ones."""
UNCOMPARED = frozenset(
    {
        *("audit_events", "console_jobs", "chores"),
        *("usage_hourly", "usage_hours", "usage_daily", "usage_days"),
        *("usage_minutely", "usage_minutes"),
        *("webhook_deliveries", "webhook_attempts", "notice_deliveries", "notice_attempts"),
    }
)
"""Tables that gateways write by themselves, and the rows of jobs, which begin before their acts."""
BROKEN = """\
CREATE TRIGGER broken BEFORE INSERT ON audit_events BEGIN SELECT RAISE(ABORT, 'broken'); END
"""


ACCESS, LIMITS = "/console/accounts/{atlas}/access", "/console/limits?account=zenith"
GROUP, LEDGER = "/console/organisations/{group}", "/console/ledger?account=atlas"
SHOWN: Mapping[str, tuple[str, str]] = {
    "/console/accounts/new": ("/console/accounts/{zeta}", "zeta"),
    "/console/accounts/{account_id}": ("/console/accounts/{zeta}", "Credit limit $5"),
    "/console/accounts/{account_id}/access": (ACCESS, "Reason look"),
    "/console/accounts/{account_id}/access/end": (ACCESS, "ended by user"),
    "/console/accounts/{account_id}/access/ask": (ACCESS, "a complaint"),
    "/console/accounts/{account_id}/access/decline": (ACCESS, "!a complaint"),
    "/console/accounts/{account_id}/access/inputs": (ACCESS, "Stop keeping inputs"),
    "/console/credit/new": (LEDGER, "paid"),
    "/console/credit/chargeback": (LEDGER, "stolen"),
    "/console/requests/{request_id}/refund": ("/console/requests/{request}", "late"),
    "/console/keys/new": ("/console/keys", "ci"),
    "/console/keys/{key_id}": ("/console/keys/{key}", "web 2"),
    "/console/keys/{key_id}/rotate": ("/console/keys/{key}", "Replaced by"),
    "/console/keys/{key_id}/revoke": ("/console/keys/{key}", "revoked"),
    "/console/limits": (LIMITS, "$3"),
    "/console/limits/{budget_id}": (LIMITS, "$4"),
    "/console/limits/{budget_id}/end": (LIMITS, "Nothing bounds this account but its credit"),
    "/console/limits/rates": (LIMITS, "0 of 9"),
    "/console/limits/rates/remove": (LIMITS, "No rate of this account is limited"),
    "/console/limits/storage": (LIMITS, "Files 0 of 9"),
    "/console/members": ("/console/members", "ann@example.com"),
    "/console/members/{user_id}": ("/console/audit?act=member.set", "viewer → member"),
    "/console/users": ("/console/users/{bo}", "Installation auditor"),
    "/console/users/{user_id}": ("/console/users/{bo}", "Installation finance"),
    "/console/users/{user_id}/link": ("/console/audit?act=link.create", "user {bo}"),
    "/console/users/sessions/{session_id}/end": ("/console/users/sessions", "!{victim}"),
    "/console/users/{user_id}/end-sessions": (
        "/console/users/{other_victim}", "Open sessions None."
    ),
    "/console/notices": ("/console/notices", "Token of the mail"),
    "/console/notices/{subscription_id}/confirm": ("/console/notices", "!Token of the mail"),
    "/console/notices/{subscription_id}/test": ("/console/notices", "This is a test"),
    "/console/notices/{subscription_id}/remove": ("/console/notices", "is told to no one"),
    "/console/organisations": (GROUP, "group"),
    "/console/organisations/{organisation_id}": (GROUP, "holding"),
    "/console/organisations/{organisation_id}/accounts": (GROUP, "atlas"),
    "/console/organisations/{organisation_id}/budgets": (GROUP, "$30"),
    "/console/organisations/{organisation_id}/budgets/{budget_id}": (GROUP, "$40"),
    "/console/organisations/{organisation_id}/accounts/{account_number}/remove": (
        GROUP, "It has no account yet"
    ),
    "/console/periods/rebates": ("/console/periods", "5 % beyond $1"),
    "/console/periods/{month}": ("/console/periods/{month}", "closed"),
    "/console/archives/{month}": ("/console/archives/{month}", "Archived"),
    "/console/statements/{month}/credit-note": (
        "/console/statements/2026-01?account=atlas", "0.5, late"
    ),
    "/console/prices/corrections/post": (LEDGER, "too dear"),
    "/console/prices/{name}": ("/console/prices/slow", "begins later"),
    "/console/ledger/prove": ("/console/ledger", "agree, proved"),
    "/console/catalog/save": ("/console/catalog", "# more"),
    "/console/catalog/reload": ("/console/audit?act=catalog.load", "catalog.load"),
    "/console/set-aside/row": ("/console/set-aside", "Nothing is set aside"),
    "/console/retention": ("/console/retention", "Cleared"),
    "/console/erasures/run": ("/console/erasures", "request {erased}"),
    "/console/webhooks/secret": ("/console/audit?act=webhook.reveal", "webhook.reveal"),
    "/console/webhooks/{request_id}/resend": ("/console/requests/{hooked}", "pending to"),
    "/console/queue/cancel/{request_id}": ("/console/requests/{open}", "cancel"),
    "/console/queue/requeue": ("/console/audit?act=queue.requeue", "queue.requeue"),
    "/console/workers/{worker}/{act}": ("/console/audit?act=worker.drain", "driver"),
    "/console/sessions/{session_id}/end": ("/console/audit?act=session.end", "session.end"),
    "/console/sessions/end-others": ("/console/sessions", "this one"),
    "/console/leave": ("/console/enter", "With a code"),
}  # fmt: skip
"""Pages that show what a form did, and how; ``!``: what they do not show any more."""


@dataclass(frozen=True)
class Step:
    """A form: its route, its address, its fields, and the acts that it is expected to do.

    ``keep`` stores the number at the end of the answer's location under a name.
    """

    route: str
    at: str
    form: Form
    acts: Sequence[str]
    who: str = "operator"
    keep: str = ""


def one(route: str, at: str, form: Form, *acts: str, who: str = "operator", keep: str = "") -> Step:
    return Step(f"/console{route}", f"/console{at}", form, acts, who, keep)


ACTING: Sequence[Step] = (
    one("/accounts/new", "/accounts/new", {"name": "zeta"}, "account.create", keep="zeta"),
    one("/accounts/{account_id}", "/accounts/{zeta}", {"credit_limit": "5", "reason": "trial"},
        "account.change"),
    one("/accounts/{account_id}/access", "/accounts/{atlas}/access",
        {"hours": "1", "reason": "look"}, "access.grant", who="owner"),
    one("/accounts/{account_id}/access/end", "/accounts/{atlas}/access/end", {}, "access.end",
        who="owner"),
    one("/accounts/{account_id}/access/ask", "/accounts/{atlas}/access/ask",
        {"request": "{request}", "reason": "a complaint"}, "access.ask"),
    one("/accounts/{account_id}/access/decline", "/accounts/{atlas}/access/decline", {},
        "access.decline", who="owner"),
    one("/accounts/{account_id}/access/inputs", "/accounts/{atlas}/access/inputs",
        {"keep": "yes"}, "account.change", who="owner"),
    one("/credit/new", "/credit/new?account=atlas",
        {"kind": "topup", "amount": "5", "reference": "r1", "reason": "paid"}, "credit.add"),
    one("/credit/chargeback", "/credit/chargeback?account=atlas",
        {"amount": "1", "reference": "r2", "reason": "stolen"}, "credit.charge_back"),
    one("/requests/{request_id}/refund", "/requests/{request}/refund",
        {"amount": "0.000000001", "reference": "r3", "reason": "late"}, "credit.refund"),
    one("/keys/new", "/keys/new", {"name": "ci", "read": "yes"}, "key.create", who="owner"),
    one("/keys/{key_id}", "/keys/{key}", {"name": "web 2"}, "key.change", who="owner"),
    one("/keys/{key_id}/rotate", "/keys/{key}/rotate", {"overlap_s": "3600"}, "key.rotate",
        who="owner"),
    one("/keys/{key_id}/revoke", "/keys/{key}/revoke", {}, "key.revoke", who="owner"),
    one("/limits", "/limits?account=zenith", {"limit": "3", "window": "day", "hard": "yes"},
        "budget.create"),
    one("/limits/{budget_id}", "/limits/{budget}?account=zenith", {"limit": "4"},
        "budget.change"),
    one("/limits/{budget_id}/end", "/limits/{budget}/end?account=zenith", {}, "budget.end"),
    one("/limits/rates", "/limits/rates?account=zenith", {"requests_per_minute": "9"},
        "limit.set"),
    one("/limits/rates/remove", "/limits/rates/remove?account=zenith", {}, "limit.remove"),
    one("/limits/storage", "/limits/storage?account=zenith", {"files": "9"}, "storage.set"),
    one("/members", "/members", {"name": "Ann", "email": "ann@example.com", "role": "viewer"},
        "user.create", "member.set", "link.create", who="owner"),
    one("/members/{user_id}", "/members/{ann}?account=id:{atlas}", {"role": "member"},
        "member.set", who="owner"),
    one("/users", "/users", {"name": "Bo", "email": "bo@example.com", "role": "auditor"},
        "user.create", keep="bo"),
    one("/users/{user_id}", "/users/{bo}", {"name": "Bo", "role": "finance", "status": "active"},
        "user.change"),
    one("/users/{user_id}/link", "/users/{bo}/link", {}, "link.create"),
    one("/users/sessions/{session_id}/end", "/users/sessions/{victim_session}/end", {},
        "session.end"),
    one("/users/{user_id}/end-sessions", "/users/{other_victim}/end-sessions", {},
        "session.end"),
    one("/notices", "/notices", {"to": "ops@example.com"}, "notice.subscribe", who="owner"),
    one("/notices/{subscription_id}/confirm", "/notices/{subscription}/confirm",
        {"token": "{token}"}, "notice.confirm", who="owner"),
    one("/notices/{subscription_id}/test", "/notices/{subscription}/test", {}, "notice.test",
        who="owner"),
    one("/notices/{subscription_id}/remove", "/notices/{subscription}/remove", {},
        "notice.unsubscribe", who="owner"),
    one("/organisations", "/organisations", {"name": "group"}, "organisation.create",
        keep="group"),
    one("/organisations/{organisation_id}", "/organisations/{group}", {"name": "holding"},
        "organisation.change"),
    one("/organisations/{organisation_id}/accounts", "/organisations/{group}/accounts",
        {"account": "atlas"}, "organisation.add"),
    one("/organisations/{organisation_id}/budgets", "/organisations/{group}/budgets",
        {"limit": "30", "window": "month"}, "budget.create"),
    one("/organisations/{organisation_id}/budgets/{budget_id}",
        "/organisations/{group}/budgets/{budget}", {"limit": "40", "whole": "yes"},
        "budget.change"),
    one("/organisations/{organisation_id}/accounts/{account_number}/remove",
        "/organisations/{group}/accounts/{atlas}/remove", {}, "organisation.remove"),
    one("/periods/rebates", "/periods/rebates",
        {"account": "atlas", "from0": "1", "percent0": "5"}, "rebate.set"),
    one("/periods/{month}", "/periods/{month}", {"do": "close"}, "period.close"),
    one("/archives/{month}", "/archives/{month}", {"do": "write"}, "period.archive",
        "period.archive"),
    one("/statements/{month}/credit-note", "/statements/2026-01/credit-note?account=atlas",
        {"amount": "0.5", "reason": "late"}, "invoice.credit"),
    one("/prices/corrections/post", "/prices/corrections/post",
        lambda known: dict_of(entered(**{
            "model": "echo", "from": known["yesterday"], "to": known["now"], "reference": "c1",
            "reason": "too dear"})), "credit.correct"),
    one("/prices/{name}", "/prices/slow",
        lambda known: dict_of(entered(**{
            "from": known["soon"], "reason": "dear", "do": "set"})), "price.set"),
    one("/ledger/prove", "/ledger/prove", {}, "ledger.reconcile"),
    one("/catalog/save", "/catalog/save",
        lambda known: {"text": known["catalog"] + "# more\n",
                       "expected": digest_of(known["catalog"].encode()),
                       "checked": digest_of((known["catalog"] + "# more\n").encode()),
                       "reason": "more"}, "catalog.save"),
    one("/catalog/reload", "/catalog/reload", {}, "catalog.load"),
    one("/set-aside/row", "/set-aside/row?kind=outcome&name=one", {"do": "retry"},
        "set_aside.retry"),
    one("/retention", "/retention", {"reason": "full"}, "retention.run"),
    one("/erasures/run", "/erasures/run", {"request": "{erased}", "reason": "asked"},
        "erasure.run"),
    one("/webhooks/secret", "/webhooks/secret", {}, "webhook.reveal", who="owner"),
    one("/webhooks/{request_id}/resend", "/webhooks/{hooked}/resend", {}, "webhook.resend"),
    one("/queue/cancel/{request_id}", "/queue/cancel/{open}", {"reason": "stuck"},
        "queue.cancel"),
    one("/queue/requeue", "/queue/requeue", {}, "queue.requeue"),
    one("/workers/{worker}/{act}", "/workers/w-1/drain", {"reason": "driver"}, "worker.drain"),
    one("/sessions/{session_id}/end", "/sessions/{own_session}/end", {}, "session.end",
        who="leaver"),
    one("/sessions/end-others", "/sessions/end-others", {}, "session.end", who="leaver"),
    one("/leave", "/leave", {}, "session.end", who="leaver"),
)  # fmt: skip


@pytest.fixture(scope="module")
def furnished(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Known]]:
    """An installation with what the forms act on."""
    directory = tmp_path_factory.mktemp("walk")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=40)
    now = datetime.now(UTC)
    known = {
        "atlas": str(seeded.accounts["atlas"].id),
        "key": str(seeded.keys["web"].id),
        "open": seeded.requests["atlas"][-1],
        "erased": seeded.requests["zenith"][0],
        "month": month_of(now.replace(day=1) - timedelta(days=1)),
        "yesterday": f"{now - timedelta(days=5):%Y-%m-%dT%H:%M:%S}",
        "now": f"{now:%Y-%m-%dT%H:%M:%S}",
        "soon": f"{now + timedelta(hours=9):%Y-%m-%dT%H:%M:%S}",
    }
    with database.transaction() as connection:
        hooked = Seeder(connection, catalog, seed=8).request(
            seeded.accounts["atlas"], seeded.keys["web"], now - timedelta(seconds=9),
            webhook="https://hooks.invalid/x",
        )  # fmt: skip
        known["hooked"] = hooked
        charged = select(receipts.c.request_id).where(
            receipts.c.account_id == int(known["atlas"]), receipts.c.charge_nanos > 100
        )
        known["request"] = str(connection.execute(charged.limit(1)).scalar_one())
        add_note(connection, "outcome", "one", "a test")
        # No gateway proves the books by itself meanwhile.
        connection.execute(insert(chores).values(name="reconcile", due_at=now + timedelta(days=1)))
        connection.execute(
            insert(invoices).values(
                number="i-1", account_id=int(known["atlas"]), kind="invoice", month="2026-01",
                total_cents=100, carried_in_nanos=0, carried_out_nanos=0, opening_nanos=0,
                closing_nanos=0, actor="test", issued_at=now,
            )
        )  # fmt: skip
    database.dispose()
    mail = {"smtp_host": "127.0.0.1", "smtp_port": 1, "mail_from": "tollgate@example.com"}
    with installed(directory / "home", url, valkey, close_months=False, **mail) as made:
        asyncio.run(announce(valkey, made.settings.namespace))
        yield made, known


async def announce(url: str, namespace: str) -> None:
    redis = connect(url)
    worker = Announcement("w-1", states={"echo": ModelState()})
    await Workers(redis, namespace=namespace).announce(worker, ttl_s=3600)
    await redis.aclose()


def test_every_form_acts_or_has_a_reason(installation: Installation) -> None:
    routes = {
        route.path for route in console_routes(installation.client.app) if route.method == "POST"
    }

    assert routes == {step.route for step in ACTING} | OTHERS.keys()
    assert {step.route for step in ACTING}.isdisjoint(OTHERS)
    assert SHOWN.keys() == {step.route for step in ACTING}


def test_every_form_that_acts_is_recorded_with_its_author(
    furnished: tuple[Installation, Known],
) -> None:
    installation, known = furnished
    browsers = {
        "operator": installation.visitor("operator"),
        "owner": installation.visitor("owner", account="atlas"),
        "leaver": installation.visitor("operator"),
    }
    victim, other = installation.visitor("auditor"), installation.visitor("auditor")
    assert victim.inside
    assert other.inside
    opened = open_sessions(installation)
    names = dict(zip(browsers, (f"user {user}" for _, user in opened), strict=False))
    known["victim_session"], known["other_victim"] = str(opened[-2][0]), str(opened[-1][1])
    known["victim"] = installation.execute(
        select(users.c.name).where(users.c.id == opened[-2][1])
    ).scalar_one()
    for _ in range(2):  # other sessions of the one who leaves: each of its forms ends one
        installation.browser().enter(installation.link(user=opened[2][1]))
    known["own_session"] = str(open_sessions(installation)[-1][0])
    known["token"] = confirmation_token(
        PEPPER.encode(), int(known["atlas"]), "mailto:ops@example.com"
    )
    seen = {event.id for event in installation.events()}
    wrong: list[Any] = []

    for step in ACTING:
        known |= current(installation)
        sent = (
            step.form(known)
            if callable(step.form)
            else {name: value.format(**known) for name, value in step.form.items()}
        )
        browser, path = browsers[step.who], step.at.format(**known)
        before = stored(installation)
        if step.route not in IN_STEPS:
            interrupted = send_unrecorded(installation, browser, path, sent)
            if (left := differing(before, stored(installation))) or interrupted:
                wrong.append((path, "was done without its act", left, interrupted))
        answer = browser.post(path, sent)
        if answer.status_code not in (200, 201, 303):
            wrong.append((path, answer.status_code, reason_of(answer.text)))
            continue
        new = acts_of(installation, names[step.who], seen, len(step.acts))
        if [each.act for each in new] != list(step.acts):
            wrong.append((path, [each.act for each in new], answer.headers.get("location")))
        wrong += [(path, event) for event in new if not is_whole(event, sent)]
        seen |= {each.id for each in new}
        if step.keep:
            known[step.keep] = str(answer.headers["location"]).rpartition("/")[2]
        known |= current(installation)
        where, wanted = (each.format(**known) for each in SHOWN[step.route])
        if not comes_to_show(browser, where, wanted):
            wrong.append((path, f"{wanted!r} is wrong", where))
        if not differing(before, stored(installation)) and step.route not in ELSEWHERE:
            wrong.append((path, "changed nothing"))

    assert wrong == [], "\n".join(str(each) for each in wrong)


def stored(installation: Installation) -> dict[str, Any]:
    """Return the rows of all tables that forms change, and the catalog's text."""
    found: dict[str, Any] = {"catalog": installation.settings.catalog.read_text()}
    with installation.database.transaction() as connection:
        for table in metadata.sorted_tables:
            if table.name not in UNCOMPARED:
                columns = [
                    each for each in table.columns if each.name not in ("seen_at", "pending")
                ]
                found[table.name] = sorted(map(repr, connection.execute(select(*columns)).all()))
    return found


def comes_to_show(browser: Browser, path: str, wanted: str) -> bool:
    """Whether a page shows a text within a while; ``!``: does not show it any more."""
    words, absent = wanted.removeprefix("!"), wanted.startswith("!")
    with contextlib.suppress(AssertionError):
        wait_for(
            lambda: (words in text_of(browser.finished(path))) is not absent, wanted, patience_s=20
        )
        return True
    return False


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def send_unrecorded(
    installation: Installation, browser: Browser, path: str, sent: Mapping[str, Any]
) -> str:
    """Send a form while no act can be recorded; return what was answered, if that is a success."""
    installation.execute(text(BROKEN))
    try:
        answer = browser.post(path, sent)
        if answer.status_code != 303 or not may_be_job(location := answer.headers["location"]):
            return "" if answer.status_code >= 400 else f"{answer.status_code} {answer.headers}"
        page = browser.finished(location)
        return "" if "It failed" in page else f"no failure at {location}"
    finally:
        installation.execute(text("DROP TRIGGER broken"))


def may_be_job(location: str) -> bool:
    """Whether a page can show the progress of a job."""
    return location.startswith(
        ("/console/retention", "/console/erasures", "/console/prices/corrections")
    )


def is_whole(event: AuditEvent, sent: Mapping[str, Any]) -> bool:
    """Whether an event has what its act changed, and the reason that was sent."""
    has_fields = event.before is not None or event.after is not None
    if event.act.endswith(".change"):
        has_fields = event.before is not None and event.after is not None
    given = sent.get("reason")
    has_reason = given is None or event.act in SILENT or event.reason in (given, given[0])
    return event.origin == "http" and (has_fields or event.act in ONE_SIDED) and has_reason


SILENT = {"catalog.load", "access.grant", "access.ask", "credit.add", "credit.charge_back"}
"""Acts whose reason is among their fields, or in another event of the same form."""


def open_sessions(installation: Installation) -> list[tuple[int, int]]:
    """Return the ids of all sessions with their users, oldest first."""
    query = select(sessions.c.id, sessions.c.user_id).order_by(sessions.c.id)
    return [(row.id, row.user_id) for row in installation.execute(query).all()]


def current(installation: Installation) -> Known:
    """Return the numbers of the newest rows, and the catalog's text."""
    newest = {
        "budget": "SELECT max(id) FROM budgets",
        "subscription": "SELECT max(id) FROM notice_subscriptions",
        "ann": "SELECT max(id) FROM users WHERE email = 'ann@example.com'",
    }
    found = {name: installation.execute(text(query)).scalar() for name, query in newest.items()}
    return {
        "catalog": installation.settings.catalog.read_text(),
        **{name: str(value) for name, value in found.items()},
    }


def acts_of(installation: Installation, actor: str, seen: set[str], count: int) -> list[AuditEvent]:
    """Return the new events of an author, oldest first; some are recorded by a job."""
    found: list[AuditEvent] = []

    def has_come() -> bool:
        found[:] = [each for each in installation.events(actor=actor) if each.id not in seen][::-1]
        return len(found) >= count

    with contextlib.suppress(AssertionError):
        wait_for(has_come, f"{count} events of {actor}", patience_s=20)
    return found


def reason_of(page: str) -> list[str]:
    return re.findall(r'(?:role="alert">|class="problem"[^>]*>|class="large">)([^<]*)', page)
