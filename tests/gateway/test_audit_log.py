"""Every administrative route records its act."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from sqlalchemy import insert

from gateway.app import create_app
from gateway.aside import add_note
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.invoices import invoices
from tests.stack import Caller, Stack, ended, order
from workers.contract.announcements import Announcement, ModelState, Workers
from workers.contract.redis import connect

SECRET = re.compile(r"tga?_[\w-]{20,}")
PRICE = [
    {"unit": "input_token", "amount": "0.01", "per": 1_000_000},
    {"unit": "output_token", "amount": "0.01", "per": 1_000_000},
]


def admin_routes(tmp_path: Path) -> Iterator[tuple[str, HTTPRouteHandler]]:
    """Yield the path and the handler of each administrative route."""
    for route in create_app(Settings(home=tmp_path)).routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                if handler.opt.get("scope") == "admin":
                    yield route.path_format, handler


class Installation:
    """An installation with something for each route to act on."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.admin = stack.caller(credit="0", scopes=("inference", "read", "admin"))
        self.customer = stack.caller(credit="1")
        self.name = f"acme-{uuid.uuid4().hex[:8]}"
        self.email = f"{self.name}@example.com"
        self.month = f"20{uuid.uuid4().int % 20:02}-01"
        self.number = f"2026-{uuid.uuid4().hex[:8]}"
        self.starts = (datetime.now(UTC) + timedelta(days=2)).isoformat()
        self.ends = (datetime.now(UTC) + timedelta(days=9)).isoformat()
        self.request = self._request(self.customer)
        self.catalog = stack.catalog.read_text()
        asyncio.run(self._announce_worker())
        self.budget = 0
        self.subscription = 0
        with self._database() as database, database.transaction() as connection:
            add_note(connection, "outcome", self.name, "a test")
            add_note(connection, "outcome", f"{self.name}-2", "a test")
            connection.execute(
                insert(invoices).values(
                    number=self.number,
                    account_id=self.customer.account_id,
                    kind="invoice",
                    month="2026-01",
                    total_cents=100,
                    carried_in_nanos=0,
                    carried_out_nanos=0,
                    opening_nanos=0,
                    closing_nanos=0,
                    actor="test",
                    issued_at=datetime.now(UTC),
                )
            )

    async def _announce_worker(self) -> None:
        """Announce a worker, which does nothing that is wished of it."""
        redis = connect(self.stack.redis_url)
        states = {"echo": ModelState()}
        announced = Announcement(self.name, states=states, loaded=("echo",))
        await Workers(redis, namespace=self.stack.namespace).announce(announced, ttl_s=600)
        await redis.aclose()

    @contextlib.contextmanager
    def _database(self) -> Iterator[Database]:
        database = Database(self.stack.database_url)
        try:
            yield database
        finally:
            database.dispose()

    def _request(self, caller: Caller) -> str:
        body = {
            "model": "echo",
            "input": {"prompt": "a b c"},
            "webhook": "http://127.0.0.1:9/hook",
        }
        answer = caller.http.post("/v1/requests", json=body)
        assert answer.status_code == 202, answer.text
        request_id = str(answer.json()["id"])
        ended(caller, request_id)
        return request_id


Call = Callable[[Installation], tuple[str, str, Any]]
"""Returns method, path and body of a call."""

CALLS: dict[str, list[tuple[str, Call]]] = {
    "CreateAccount": [
        ("account.create", lambda i: ("POST", "/v1/admin/accounts", {"name": i.name}))
    ],
    "ChangeAccount": [
        (
            "account.change",
            lambda i: ("PATCH", f"/v1/admin/accounts/{i.name}", {"credit_limit": "1"}),
        )
    ],
    "CreateKey": [
        ("key.create", lambda i: ("POST", f"/v1/admin/accounts/{i.name}/keys", {"name": "k"}))
    ],
    "Erase": [("erasure.run", lambda i: ("POST", "/v1/admin/erasures", {"tag": "a=b"}))],
    "CreateUser": [
        (
            "user.create",
            lambda i: ("POST", "/v1/admin/users", {"name": "Ann", "email": i.email}),
        )
    ],
    "ChangeUser": [
        (
            "user.change",
            lambda i: ("PATCH", f"/v1/admin/users/{i.email}", {"role": "auditor"}),
        )
    ],
    "SetMember": [
        (
            "member.set",
            lambda i: (
                "PUT",
                f"/v1/admin/accounts/{i.name}/members/{i.email}",
                {"role": "owner"},
            ),
        )
    ],
    "RemoveMember": [
        (
            "member.remove",
            lambda i: ("DELETE", f"/v1/admin/accounts/{i.name}/members/{i.email}", None),
        )
    ],
    "CreateOrganisation": [
        (
            "organisation.create",
            lambda i: ("POST", "/v1/admin/organisations", {"name": f"{i.name}-group"}),
        )
    ],
    "AddOrganisationAccount": [
        (
            "organisation.add",
            lambda i: ("PUT", f"/v1/admin/organisations/{i.name}-group/accounts/{i.name}", None),
        )
    ],
    "CreateOrganisationBudget": [
        (
            "budget.create",
            lambda i: (
                "POST",
                f"/v1/admin/organisations/{i.name}-group/budgets",
                {"limit": "9", "window": "day"},
            ),
        )
    ],
    "RemoveOrganisationAccount": [
        (
            "organisation.remove",
            lambda i: (
                "DELETE",
                f"/v1/admin/organisations/{i.name}-group/accounts/{i.name}",
                None,
            ),
        )
    ],
    "RenameOrganisation": [
        (
            "organisation.change",
            lambda i: (
                "PATCH",
                f"/v1/admin/organisations/{i.name}-group",
                {"name": f"{i.name}-holding"},
            ),
        )
    ],
    "ChangeKey": [
        (
            "key.change",
            lambda i: ("PATCH", f"/v1/admin/keys/{i.customer.key_id}", {"name": "new"}),
        )
    ],
    "RotateKey": [
        ("key.rotate", lambda i: ("POST", f"/v1/admin/keys/{i.customer.key_id}/rotate", {}))
    ],
    "RevokeKey": [
        ("key.revoke", lambda i: ("DELETE", f"/v1/admin/keys/{i.customer.key_id}", None))
    ],
    "AddCredit": [
        (
            "credit.add",
            lambda i: (
                "POST",
                f"/v1/admin/accounts/{i.name}/credit",
                {"kind": "topup", "amount": "5", "reference": i.name, "reason": "paid"},
            ),
        )
    ],
    "ChargeBack": [
        (
            "credit.charge_back",
            lambda i: (
                "POST",
                f"/v1/admin/accounts/{i.name}/chargebacks",
                {"amount": "1", "reference": i.name, "reason": "stolen"},
            ),
        )
    ],
    "RefundRequest": [
        (
            "credit.refund",
            lambda i: (
                "POST",
                f"/v1/admin/requests/{i.request}/refund",
                {"amount": "0.000000001", "reason": "late"},
            ),
        )
    ],
    "CorrectPrice": [
        (
            "credit.correct",
            lambda i: (
                "POST",
                "/v1/admin/corrections",
                {
                    "model": "echo",
                    "account": str(i.customer.account_id),
                    "from": (datetime.now(UTC) - timedelta(days=1)).isoformat(),
                    "to": datetime.now(UTC).isoformat(),
                    "price": PRICE,
                    "reference": i.name,
                    "reason": "wrong",
                    "dry_run": False,
                },
            ),
        )
    ],
    "ReloadCatalog": [("catalog.load", lambda i: ("POST", "/v1/admin/catalog/reload", None))],
    "SaveCatalog": [
        (
            "catalog.save",
            lambda i: (
                "PUT",
                "/v1/admin/catalog",
                {"text": i.catalog, "expected_sha256": sha256(i.catalog.encode()).hexdigest()},
            ),
        )
    ],
    "Reconcile": [("ledger.reconcile", lambda i: ("POST", "/v1/admin/reconcile", None))],
    "SetPrice": [
        (
            "price.set",
            lambda i: (
                "POST",
                "/v1/admin/prices",
                {
                    "model": "echo",
                    "account": i.name,
                    "price": PRICE,
                    "from": i.starts,
                    "reason": "contract",
                },
            ),
        ),
        (
            "price.end",
            lambda i: (
                "POST",
                "/v1/admin/prices",
                {
                    "model": "echo",
                    "account": i.name,
                    "from": i.ends,
                    "reason": "over",
                },
            ),
        ),
    ],
    "CancelPrice": [
        (
            "price.cancel",
            lambda i: (
                "POST",
                "/v1/admin/prices/cancel",
                {"model": "echo", "account": i.name, "from": i.ends, "reason": "wrong"},
            ),
        )
    ],
    "ResolveSetAside": [
        ("set_aside.retry", lambda i: ("POST", f"/v1/admin/set-aside/outcome/{i.name}/retry", {})),
        (
            "set_aside.release",
            lambda i: ("POST", f"/v1/admin/set-aside/outcome/{i.name}-2/release", {}),
        ),
    ],
    "DrainWorker": [
        ("worker.drain", lambda i: ("POST", f"/v1/admin/workers/{i.name}/drain", None))
    ],
    "ResumeWorker": [
        ("worker.resume", lambda i: ("POST", f"/v1/admin/workers/{i.name}/resume", None))
    ],
    "LoadModel": [
        (
            "worker.load",
            lambda i: ("POST", f"/v1/admin/workers/{i.name}/load", {"model": "echo"}),
        )
    ],
    "UnloadModel": [
        (
            "worker.unload",
            lambda i: ("POST", f"/v1/admin/workers/{i.name}/unload", {"model": "echo"}),
        )
    ],
    "RequeueLost": [("queue.requeue", lambda i: ("POST", "/v1/admin/queues/requeue", None))],
    "CancelOpenRequest": [
        (
            "queue.cancel",
            lambda i: (
                "POST",
                "/v1/admin/queues/cancel",
                {"request": order(i.stack.caller(), "slow", "word " * 400)},
            ),
        )
    ],
    "CreateBudget": [
        (
            "budget.create",
            lambda i: (
                "POST",
                "/v1/admin/budgets",
                {"account": i.name, "limit": "1", "window": "day"},
            ),
        )
    ],
    "ChangeBudget": [
        ("budget.change", lambda i: ("PATCH", f"/v1/admin/budgets/{i.budget}", {"limit": "2"}))
    ],
    "EndBudget": [("budget.end", lambda i: ("DELETE", f"/v1/admin/budgets/{i.budget}", None))],
    "SetRateLimit": [
        (
            "limit.set",
            lambda i: ("PUT", "/v1/admin/rate-limits", {"account": i.name, "concurrent": 3}),
        )
    ],
    "RemoveRateLimit": [
        ("limit.remove", lambda i: ("DELETE", f"/v1/admin/rate-limits?account={i.name}", None))
    ],
    "SetStorageLimits": [
        ("storage.set", lambda i: ("PUT", "/v1/admin/storage-limits", {"account": i.name}))
    ],
    "ClosePeriod": [
        ("period.close", lambda i: ("POST", f"/v1/admin/periods/{i.month}/close", None))
    ],
    "CreateCreditNote": [
        (
            "invoice.credit",
            lambda i: (
                "POST",
                f"/v1/admin/invoices/{i.number}/credit-notes",
                {"amount": "0.5", "reason": "double"},
            ),
        )
    ],
    "SetRebates": [
        (
            "rebate.set",
            lambda i: (
                "PUT",
                "/v1/admin/rebates",
                {"account": i.name, "tiers": [{"from": "1000", "percent": "5"}]},
            ),
        )
    ],
    "AddNoticeSubscription": [
        (
            "notice.subscribe",
            lambda i: (
                "POST",
                "/v1/admin/notices/subscriptions",
                {"account": i.name, "url": f"http://127.0.0.1:9/{i.name}"},
            ),
        )
    ],
    "TestNoticeSubscription": [
        (
            "notice.test",
            lambda i: ("POST", f"/v1/admin/notices/subscriptions/{i.subscription}/test", None),
        )
    ],
    "RemoveNoticeSubscription": [
        (
            "notice.unsubscribe",
            lambda i: ("DELETE", f"/v1/admin/notices/subscriptions/{i.subscription}", None),
        )
    ],
    "RedeliverWebhookOfAny": [
        ("webhook.resend", lambda i: ("POST", f"/v1/admin/requests/{i.request}/redeliver", None))
    ],
}
"""For each administrative route that changes something: its acts, and calls that do them."""


def test_every_administrative_route_has_a_call_that_acts(tmp_path: Path) -> None:
    acting = {
        handler.operation_id
        for _, handler in admin_routes(tmp_path)
        if not handler.http_methods & {"GET", "HEAD", "OPTIONS"} and not handler.opt.get("reads")
    }

    assert acting == set(CALLS)


def test_every_administrative_route_records_its_act(stack: Stack) -> None:
    installation = Installation(stack)
    admin = installation.admin.http
    stored = ""
    for name, calls in CALLS.items():
        for act, call in calls:
            method, path, body = call(installation)
            call_id = f"{name}-{uuid.uuid4().hex}"
            headers: Any = {"X-Request-Id": call_id, "X-Audit-Reason": "grüße".encode()}

            answer = admin.request(method, path, json=body, headers=headers)

            assert answer.is_success, f"{name}: {answer.text}"
            assert answer.headers["x-request-id"] == call_id
            if name == "CreateBudget":
                installation.budget = answer.json()["id"]
            if name == "AddNoticeSubscription":
                installation.subscription = answer.json()["id"]
            found = admin.get("/v1/admin/audit", params={"call_id": call_id}).json()["data"]
            assert [event["act"] for event in found] == [act], name
            (event,) = found
            assert event["actor"] == installation.admin.secret[:10]
            assert event["key_id"] == installation.admin.key_id
            assert event["origin"] == "http"
            assert event["reason"] in ("grüße", (body or {}).get("reason")), name
            assert event["before"] is not None or event["after"] is not None
            stored += json.dumps(event)
    assert SECRET.search(stored) is None


def test_repeating_a_credit_records_nothing_more(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",)).http
    name = f"acme-{uuid.uuid4().hex[:8]}"
    admin.post("/v1/admin/accounts", json={"name": name}).raise_for_status()
    body = {"kind": "grant", "amount": "1", "reference": name, "reason": "x"}

    for _ in range(2):
        admin.post(f"/v1/admin/accounts/{name}/credit", json=body).raise_for_status()

    found = admin.get("/v1/admin/audit", params={"account": name, "act": "credit.add"}).json()
    assert len(found["data"]) == 1
    assert found["data"][0]["after"]["amount"] == "1"


def test_refused_calls_record_nothing(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",)).http
    headers = {"X-Request-Id": uuid.uuid4().hex}

    refused = admin.patch("/v1/admin/budgets/999999", json={"limit": "1"}, headers=headers)
    unstorable = admin.post(
        "/v1/admin/accounts", json={"name": "x"}, headers={"X-Audit-Reason": "r" * 501}
    )

    assert refused.status_code == 404
    assert unstorable.status_code == 400
    assert unstorable.json()["error"]["param"] == "X-Audit-Reason"
    found = admin.get("/v1/admin/audit", params={"call_id": headers["X-Request-Id"]}).json()
    assert found["data"] == []


def test_log_is_read_in_pages_and_exported(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",))
    name = f"acme-{uuid.uuid4().hex[:8]}"
    admin.http.post("/v1/admin/accounts", json={"name": name}).raise_for_status()
    for limit in ("1", "2", "3"):
        admin.http.patch(f"/v1/admin/accounts/{name}", json={"credit_limit": limit})
    wanted = {"account": name}

    first = admin.http.get("/v1/admin/audit", params={**wanted, "limit": 3}).json()
    rest = admin.http.get(
        "/v1/admin/audit", params={**wanted, "limit": 3, "cursor": first["next_cursor"]}
    ).json()
    lines = admin.http.get("/v1/admin/audit/export", params=wanted)
    table = admin.http.get("/v1/admin/audit/export", params={**wanted, "format": "csv"})

    assert first["has_more"]
    assert not rest["has_more"]
    ids = [event["id"] for event in first["data"] + rest["data"]]
    assert [json.loads(line)["id"] for line in lines.text.splitlines()] == ids[::-1]
    assert [row.split(",")[0] for row in table.text.splitlines()[1:]] == ids[::-1]
    assert 'filename="audit.csv"' in table.headers["content-disposition"]


@pytest.mark.parametrize(
    "query", ["act=eat", "cursor=x", "from=yesterday", "origin=mail", "limit=0"]
)
def test_invalid_filters_are_refused(stack: Stack, query: str) -> None:
    admin = stack.caller(credit="0", scopes=("admin",))

    assert admin.http.get(f"/v1/admin/audit?{query}").status_code == 400


def test_log_needs_the_scope_admin(stack: Stack) -> None:
    client = stack.caller(credit="0")

    for path in ("/v1/admin/audit", "/v1/admin/audit/export"):
        answer: httpx.Response = client.http.get(path)
        assert answer.status_code == 403
