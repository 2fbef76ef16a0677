"""Fills every text that somebody else can enter with markup, scripts and formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import yaml
from sqlalchemy import Connection, insert, update

from gateway.accounts.accounts import create_account
from gateway.accounts.budgets import create_budget, create_organisation_budget
from gateway.accounts.keys import KeyInfo, create_key
from gateway.accounts.limits import Limit, set_limit
from gateway.accounts.organisations import add_account, create_organisation
from gateway.accounts.users import create_user, set_member
from gateway.aside import add_note
from gateway.audit_log import Author, record
from gateway.billing.statements.close import NOTE_REASON_MAX, credit_note
from gateway.catalog.reloads import digest_of
from gateway.console.jobs.store import digest_of as job_digest
from gateway.feedback.store import RatedRequest, put
from gateway.files.retention import SentOrder, StoredInput, _encode
from gateway.ids import new_id
from gateway.ledger.closed import Output, RequestError
from gateway.ledger.expenses import RunRecord
from gateway.ledger.holds import hold
from gateway.ledger.prices import set_price
from gateway.ledger.refunds import refund
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.transfers import add_credit
from gateway.notices.subscriptions import subscribe
from gateway.operations.running.gateways import Gateways, GatewayState
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import Database
from gateway.tables.batches import batches, files
from gateway.tables.core import chores
from gateway.tables.files import media
from gateway.tables.invoices import invoice_lines, invoices
from gateway.tables.notices import notice_attempts, notice_deliveries, notices
from gateway.tables.payments import payments
from gateway.tables.proofs import reconciliations
from gateway.tables.users import console_jobs, content_asks, content_grants
from gateway.tables.voices import voice_recordings
from gateway.tables.webhooks import webhook_attempts, webhook_deliveries
from tests.console.payloads import PAYLOADS, Dealer
from tests.console.seeding import PEPPER, RATES, TEXT, Seeded, Seeder
from workers.contract.announcements import Announcement, EndpointState, ModelState, Workers
from workers.contract.jobs import Choice, RequestId, TokenLogprob, ToolCall
from workers.contract.redis import connect

MODEL: Final = "hostile"
MONTH: Final = "2026-01"
NAME: Final = 120


@dataclass
class Furnished:
    """What was stored, and the addresses of pages about it that need more than a list."""

    dealer: Dealer
    of_operators: list[str] = field(default_factory=list)
    of_members: list[str] = field(default_factory=list)


def catalog_with(dealer: Dealer, text: str) -> str:
    """Return a catalog with one more model, of whose texts each has payloads."""
    entry = {
        "name": MODEL,
        "task": "text-generation",
        "engine": "echo",
        "limits": {"context_tokens": 4096, "output_tokens": 512},
        "price": [{"unit": "request", "amount": "0.08"}],
        "description": dealer.some("description", 900),
        "why": dealer.some("why", 900),
        "license": dealer.some("license", 200),
        "vendor": dealer.some("vendor", 200),
        "family": dealer.some("family", 200),
        "strengths": [dealer.some("strength", 200)],
        "good_for": [dealer.some("good-for", 40)],
        "roles": [dealer.some("role", 40)],
        "languages": [dealer.some("language", 40)],
        "examples": [
            {"messages": [{"role": "user", "content": dealer.some("example", 300)}]},
        ],
    }
    listed = yaml.safe_load(text)
    listed["models"].append(entry)
    return yaml.safe_dump(listed, allow_unicode=True, sort_keys=False)


class Furnisher:
    """Stores texts in one transaction; members are those of atlas."""

    def __init__(
        self, connection: Connection, catalog: Path, seeded: Seeded, furnished: Furnished
    ) -> None:
        self._connection = connection
        self._catalog = catalog
        self._seeded = seeded
        self._made = furnished
        self._dealer = furnished.dealer
        self._atlas = seeded.accounts["atlas"]
        self._now = datetime.now(UTC)

    def furnish(self) -> None:
        key = self._names()
        charged = self._requests(key)
        self._contents(charged)
        self._deliveries(charged)
        self._money(charged)
        self._files(key)
        self._notices()
        self._people(charged)
        self._records()

    def _insert(self, table: Any, **values: Any) -> None:
        self._connection.execute(insert(table).values(**values))

    def _names(self) -> KeyInfo:
        connection, dealer, atlas = self._connection, self._dealer, self._atlas.id
        for name in dealer.each("key", NAME):
            _, key = create_key(connection, atlas, pepper=PEPPER, name=name)
        for name in dealer.each("budget", NAME):
            create_budget(connection, atlas, NANOS_PER_USD, window="day", name=name)
        for name in dealer.each("account", NAME, without="/"):
            other = create_account(connection, name)
        for number, name in enumerate(dealer.each("user", NAME)):
            email = f"={number}{'<svg/onload=alert`1`>' if number else ''}@example.com"
            user = create_user(connection, name, email=email, role=None)
            set_member(connection, user.id, atlas, "viewer")
        group = create_organisation(connection, dealer.some("organisation", 200, without="/"))
        add_account(connection, group.id, other.id)
        create_organisation_budget(
            connection, group.id, NANOS_PER_USD, window="month", name=dealer.some("whole", NAME)
        )
        set_limit(connection, Limit(atlas, model="echo", requests_per_minute=9))
        root = f"/console/organisations/{group.id}"
        self._made.of_operators += [
            root,
            f"{root}/accounts/{other.id}/remove",
            f"{root}/statements/{self._now:%Y-%m}",
            "/console/limits/rates/remove?account=atlas&model=echo",
            f"/console/accounts/{other.id}",
        ]
        return key

    def _requests(self, key: KeyInfo) -> str:
        """Make a request that succeeded, one that failed and an open one; return the first."""
        dealer, seeder = self._dealer, Seeder(self._connection, self._catalog, seed=9)
        entry, made = seeder.entry("text-generation"), []
        for kind in ("charged", "failed", "open"):
            tags = {f"<b>{kind}": dealer.some(f"tag-{kind}", 400)}
            webhook = f"https://hooks.invalid/{kind}/{quote(PAYLOADS[0])}"
            at = self._now - timedelta(seconds=2)
            order = seeder._hold(self._atlas, key, entry, TEXT, at, webhook=webhook)
            made.append(msgspec.structs.replace(order, metadata=tags))
        hold(self._connection, made)
        charged, failed, open = (each.request_id for each in made)
        run = RunRecord(
            worker=dealer.some("run-worker", 100), attempt=1, device=dealer.some("run-device", 200),
            dtype="bf16", endpoint=dealer.some("run-endpoint", 100),
        )  # fmt: skip
        error = RequestError(
            "upstream_error", dealer.all("error"), param=dealer.some("error-param", 100)
        )
        self._settle(charged, status="succeeded", output=self._output(), run=run)
        self._settle(failed, status="failed", error=error)
        for request_id in (charged, failed, open):
            self._made.of_operators.append(f"/console/requests/{request_id}")
            self._made.of_members.append(f"/console/requests/{request_id}")
        return charged

    def _settle(self, request_id: str, **given: Any) -> None:
        done = given["status"] == "succeeded"
        settlement = Settlement(
            RequestId(request_id),
            reason="completed" if done else "upstream_error",
            billable=done,
            usage=TEXT.usage,
            timings=TEXT.timings,
            **given,
        )
        settle(
            self._connection, [settlement], now=self._now, prices={}, retention=timedelta(days=7),
            rates=RATES,
        )  # fmt: skip

    def _output(self) -> Output:
        dealer = self._dealer
        # What is shown as JSON has its quotation marks escaped.
        call = ToolCall(
            "call_1",
            dealer.some("tool-name", 200, without='"'),
            dealer.some("tool-call", 500, without='"'),
        )
        other = dealer.some("other-token", 100, without='"')
        likely = TokenLogprob(dealer.some("token", 100, without='"'), -0.1, ((other, -2.0),))
        answers = (
            Choice(0, dealer.all("answer"), "stop", logprobs=(likely,)),
            Choice(1, "", "tool_calls", tool_calls=(call,)),
        )
        return Output({
            "choices": [msgspec.to_builtins(each) for each in answers],
            "<b>json": dealer.some("json", 400, without='"'),
        })  # fmt: skip

    def _contents(self, request_id: str) -> None:
        dealer = self._dealer
        function = {"name": "f", "description": dealer.some("tool-description", 300, without='"')}
        sent = {
            "messages": [
                {"role": "system", "content": dealer.some("system-prompt", 400)},
                {"role": "user", "content": dealer.all("prompt")},
            ],
            "tools": [{"type": "function", "function": function}],
            "stop": [dealer.some("stop", 100, without='"')],
        }
        kept = StoredInput({}, order=SentOrder("echo", "text-generation", sent))
        self._insert(
            media, request_id=request_id, account_id=self._atlas.id, task="text-generation",
            asked=_encode(kept), clear_at=self._now + timedelta(hours=1),
        )  # fmt: skip
        rated = RatedRequest(
            request_id, self._atlas.id, "echo", "text-generation", "echo", self._now
        )
        labels = [dealer.some("label", 40)]
        put(self._connection, rated, rating=1, labels=labels, comment=dealer.all("comment"),
            now=self._now)  # fmt: skip

    def _deliveries(self, request_id: str) -> None:
        url = self._dealer.some("webhook-url", 1000, without=" ")
        self._connection.execute(
            update(webhook_deliveries)
            .where(webhook_deliveries.c.account_id == self._atlas.id)
            .values(outcome="failed", ended_at=self._now, tried=1, attempts=1)
        )
        self._connection.execute(
            update(webhook_deliveries)
            .where(webhook_deliveries.c.request_id == request_id)
            .values(url=f"https://hooks.invalid/{url}")
        )
        self._insert(
            webhook_attempts, request_id=request_id, number=1, started_at=self._now, duration_ms=9,
            code=500, answer=self._dealer.some("webhook-answer", 200),
        )  # fmt: skip

    def _money(self, request_id: str) -> None:
        connection, dealer, atlas = self._connection, self._dealer, self._atlas.id
        actor = dealer.some("actor", 200)
        moved = add_credit(
            connection, atlas, NANOS_PER_USD, kind="grant", key=dealer.some("reference", 120),
            actor=actor, reason=dealer.some("credit-reason", 500),
        )  # fmt: skip
        refund(
            connection, request_id, 1, key="refund:hostile", actor=actor,
            reason=dealer.some("refund-reason", 500),
        )  # fmt: skip
        later = self._now + timedelta(days=1)
        seeder = Seeder(connection, self._catalog, seed=10)
        set_price(
            connection, "echo", seeder.entry("text-generation").selling_price, starts_at=later,
            actor=dealer.some("price-actor", 200), reason=dealer.some("price-reason", 500),
        )  # fmt: skip
        payment = new_id("pay_")
        self._insert(
            payments, id=payment, account_id=atlas, provider="stripe",
            reference=dealer.some("payment", 255), amount_nanos=NANOS_PER_USD, status="expired",
            created_at=self._now,
        )  # fmt: skip
        number = dealer.some("invoice-number", 40)
        self._insert(
            invoices, id=1, number=number, account_id=atlas, kind="invoice", month=MONTH,
            total_cents=100, carried_in_nanos=0, carried_out_nanos=0, opening_nanos=0,
            closing_nanos=0, actor=actor, issued_at=self._now,
        )  # fmt: skip
        self._insert(
            invoice_lines, invoice_id=1, seq=1, kind="minimum", amount_nanos=NANOS_PER_USD,
            description=dealer.some("invoice-line", 500),
        )  # fmt: skip
        credit_note(
            connection, number, NANOS_PER_USD // 2, actor="ann",
            reason=dealer.some("credit-note-reason", NOTE_REASON_MAX),
        )  # fmt: skip
        # No other proof follows soon.
        self._insert(chores, name="reconcile", due_at=later)
        self._insert(
            reconciliations, started_at=self._now, finished_at=self._now,
            findings=[{"rule": "R1", "subject": dealer.some("finding-subject", 300),
                       "message": dealer.some("finding", 500)}],
        )  # fmt: skip
        for paths in (self._made.of_operators, self._made.of_members):
            paths += [
                f"/console/ledger/{moved.id}?account=atlas",
                f"/console/statements/{MONTH}?account=atlas",
                f"/console/payments/{payment}",
            ]
        self._made.of_operators.append(f"/console/statements/{MONTH}/credit-note?account=atlas")

    def _files(self, key: KeyInfo) -> None:
        dealer, atlas = self._dealer, self._atlas.id
        for number, name in enumerate(dealer.each("file", 200)):
            self._insert(
                files, id=new_id("file-"), account_id=atlas, purpose="user_data", filename=name,
                bytes=number, blob_key=f"x/{number}", sha256="0" * 64, content_type="text/plain",
                created_at=self._now,
            )  # fmt: skip
        batch = new_id("batch_")
        self._insert(
            batches, id=batch, account_id=atlas, key_id=key.id, endpoint="/v1/chat/completions",
            input_file_id=new_id("file-"), completion_window="24h", status="failed",
            metadata={"<b>tag": dealer.some("batch-tag", 400)}, created_at=self._now,
            errors=[{"line": 1, "code": "invalid", "param": dealer.some("line-param", 100),
                     "message": dealer.some("line-mistake", 500)}],
            expires_at=self._now + timedelta(days=1), ended_at=self._now,
        )  # fmt: skip
        self._made.of_members.append(f"/console/batches/{batch}")
        consent = new_id("cons_")
        recording = {
            "account_id": atlas, "blob_key": "x", "bytes": 1, "sha256": "0" * 64,
            "content_type": "audio/wav", "created_at": self._now,
        }  # fmt: skip
        self._insert(
            voice_recordings, id=consent, name=dealer.some("consent", 100), language="en",
            **recording,
        )  # fmt: skip
        for name in dealer.each("voice", 100):
            described = dealer.some(f"{name[1:].partition(' ')[0]}-description", 500)
            self._insert(
                voice_recordings, id=new_id("voice_"), name=name, consent_id=consent,
                description=described, **recording,
            )  # fmt: skip

    def _notices(self) -> None:
        dealer, atlas = self._dealer, self._atlas.id
        url = f"https://hooks.invalid/{dealer.some('notice-url', 500, without=' ')}"
        to = subscribe(self._connection, atlas, url, None)
        mail = subscribe(self._connection, atlas, f"mailto:{PAYLOADS[2]}@example.com", None)
        for number, kind in enumerate(("budget.passed", "key.expiring")):
            told, sent = new_id("notice_"), new_id("notice_")
            self._insert(
                notices, id=told, key=f"hostile:{number}", account_id=atlas, kind=kind,
                subject="budget 1", title=dealer.some(f"notice-title-{number}", 400),
                text=dealer.all(f"notice-text-{number}"), data={}, created_at=self._now,
            )  # fmt: skip
            self._insert(
                notice_deliveries, id=sent, notice_id=told, subscription_id=to.id,
                account_id=atlas, kind=kind, url=url, attempts=1, tried=1, due_at=self._now,
                queued_at=self._now, outcome="failed", ended_at=self._now,
            )  # fmt: skip
            self._insert(
                notice_attempts, delivery_id=sent, number=1, started_at=self._now, duration_ms=9,
                code=500, answer=dealer.some(f"notice-answer-{number}", 200),
            )  # fmt: skip
        for paths in (self._made.of_operators, self._made.of_members):
            paths += [f"/console/notices/{each.id}/remove" for each in (to, mail)]

    def _people(self, request_id: str) -> None:
        dealer, atlas = self._dealer, self._atlas.id
        self._insert(
            content_grants, account_id=atlas, actor=dealer.some("grant-actor", 200),
            reason=dealer.some("grant-reason", 500), starts_at=self._now,
            ends_at=self._now + timedelta(hours=8),
        )  # fmt: skip
        self._insert(
            content_grants, account_id=atlas, actor="ann", reason="past",
            starts_at=self._now - timedelta(hours=2), ends_at=self._now - timedelta(hours=1),
            ended_by=dealer.some("grant-ended-by", 200),
        )  # fmt: skip
        self._insert(
            content_asks, account_id=atlas, request_id=request_id,
            actor=dealer.some("ask-actor", 200), reason=dealer.some("ask-reason", 500),
            asked_at=self._now, ends_at=self._now + timedelta(days=1),
        )  # fmt: skip
        author = Author(
            dealer.some("audit-actor", 200), "http", call_id=dealer.some("audit-call", 200)
        )
        record(
            self._connection, author, "account.change", dealer.some("audit-subject", 300),
            account_id=atlas, before={"<b>name": dealer.some("audit-before", 300)},
            after={"<b>name": dealer.some("audit-after", 300)},
            reason=dealer.some("audit-reason", 500),
        )  # fmt: skip
        record(
            self._connection, author, "erasure.run", f"account {atlas}", account_id=atlas,
            after={"tag": dealer.some("erasure-tag", 300)},
            reason=dealer.some("erasure-reason", 500),
        )  # fmt: skip

    def _records(self) -> None:
        dealer = self._dealer
        name = dealer.some("aside-name", 255)
        add_note(self._connection, "price", name, dealer.some("aside-reason", 500))
        row = f"/console/set-aside/row?kind=price&name={quote(name, safe='')}"
        result = self._seeded.requests["atlas"][0]
        content = dealer.all("aside-content")
        add_note(self._connection, "result", result, "cannot be read", content=content)
        self._made.of_operators += [row, f"/console/set-aside/row?kind=result&name={result}"]
        finding = {"model": "Veo3", "level": "error", "message": dealer.some("upstream", 500)}
        for kind, state, more in (
            ("upstream.check", "done", {"result": {"asked": 1, "findings": [finding]}}),
            ("retention.run", "failed", {"problem": dealer.some("job-problem", 900)}),
        ):
            self._insert(
                console_jobs, id=new_id(""), kind=kind, digest=job_digest(), starter="ann",
                act="installation.read", back="/console", state=state, can_cancel=True,
                started_at=self._now, seen_at=self._now, ended_at=self._now, **more,
            )  # fmt: skip
        job = new_id("")
        self._insert(
            console_jobs, id=job, kind="walk", digest=digest_of(b"walk"), starter="ann",
            act="installation.read", back="/console", can_cancel=True, started_at=self._now,
            seen_at=self._now + timedelta(hours=1),
        )  # fmt: skip
        self._made.of_operators += [
            f"/console/jobs/{job}",
            f"/console/queue/cancel/{self._seeded.requests['atlas'][-1]}",
            "/console/queue/requeue",
            "/console/docs/types/LedgerEntryView",
            f"/console/models/{MODEL}",
        ]
        self._made.of_members.append(f"/console/models/{MODEL}")


def furnish(database: Database, catalog: Path, seeded: Seeded, dealer: Dealer) -> Furnished:
    """Store payloads in every text that somebody else can enter."""
    made = Furnished(dealer)
    with database.transaction() as connection:
        Furnisher(connection, catalog, seeded, made).furnish()
    return made


async def announce(url: str, namespace: str, made: Furnished) -> None:
    """Announce a worker and a gateway whose texts have payloads."""
    dealer, redis = made.dealer, connect(url)
    name = dealer.some("worker", 100, without="/")
    worker = Announcement(
        name,
        models=("echo", "slow"),
        loaded=("echo",),
        unavailable={"brief": dealer.some("unavailable", 300)},
        problems={"slow": dealer.some("problem", 300)},
        device=dealer.some("device", 200),
        catalog_problem=dealer.some("catalog-problem", 500),
        version=dealer.some("version", 100),
        states={"echo": ModelState(capacity=1, device=dealer.some("model-device", 200))},
        endpoints=(
            EndpointState(
                "Veo3", dealer.some("host", 200), limit=1, state="down", since_ms=1,
            ),
        ),
    )  # fmt: skip
    await Workers(redis, namespace=namespace).announce(worker, ttl_s=3600)
    path = f"/console/workers/{quote(name, safe='')}"
    made.of_operators += [path, f"{path}/drain"]
    gateway = GatewayState(
        "hostile", host=dealer.some("gateway-host", 200), version=dealer.some("gateway-version", 99)
    )
    gateways = Gateways(redis, namespace=namespace)
    await gateways.write(gateway)
    await redis.persist(gateways._key(gateway.name))
    await redis.aclose()
