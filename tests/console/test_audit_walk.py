"""Every form of the console that changes something is sent once, and its act found with its author.

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
from gateway.tables.core import receipts
from gateway.tables.invoices import invoices
from gateway.tables.users import sessions
from tests.console.routes import console_routes
from tests.console.seeding import Seeder, seed
from tests.console.test_prices import dict_of, entered
from tests.console.visiting import Installation, installed
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
    "/console/requests/columns": OWN,
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
        answer = browsers[step.who].post(step.at.format(**known), sent)
        if answer.status_code not in (200, 201, 303):
            wrong.append((step.at, answer.status_code, reason_of(answer.text)))
            continue
        new = acts_of(installation, names[step.who], seen, len(step.acts))
        if [each.act for each in new] != list(step.acts):
            wrong.append((step.at, [each.act for each in new], answer.headers.get("location")))
        wrong += [(step.at, event) for event in new if not is_whole(event, sent)]
        seen |= {each.id for each in new}
        if step.keep:
            known[step.keep] = str(answer.headers["location"]).rpartition("/")[2]

    assert wrong == [], "\n".join(str(each) for each in wrong)


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
