"""Every command that changes something records its act."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from sqlalchemy import insert

from gateway.__main__ import cli
from gateway.aside import add_note
from gateway.audit_log import AuditEvent, AuditFilter, list_events
from gateway.billing.usage.rollups import build_hour
from gateway.commands.terminal import subcommands
from gateway.ledger.holds import hold
from gateway.ledger.prices import put_in_force
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.invoices import invoices
from tests.ledger.books import done, open_books
from tests.stack import CATALOG
from workers.contract.announcements import Announcement, ModelState, Workers
from workers.contract.redis import connect

READING = {
    "account list",
    "account show",
    "archive list",
    "archive verify",
    "aside list",
    "aside show",
    "audit export",
    "audit list",
    "budget list",
    "catalog check",
    "catalog diff",
    "catalog pick",
    "catalog price list",
    "catalog show",
    "catalog whatif",
    "doctor",
    "export",
    "feedback export",
    "feedback summary",
    "gateway list",
    "gateway tasks",
    "invoice list",
    "invoice print",
    "key list",
    "ledger",
    "margin",
    "limit list",
    "notices list",
    "organisation list",
    "organisation show",
    "organisation statement",
    "notices sent",
    "period list",
    "period verify",
    "plan",
    "queue list",
    "queue show",
    "rebate list",
    "request show",
    "retention show",
    "settings",
    "try",
    "upstream check",
    "upstream list",
    "usage",
    "member list",
    "model add",
    "user list",
    "webhook list",
    "worker list",
    "worker show",
}
RUNNING = {"demo", "serve", "up"}
"""They run until they are stopped; the first start is tested with the audit log itself."""
ACTING: dict[str, tuple[str, str]] = {
    "migrate": ("", "database.migrate"),
    "account create": ("acme --credit-limit 1", "account.create"),
    "account set": ("acme --allowance 5", "account.change"),
    "key create": ("acme --name ci", "key.create"),
    "credit add": ("acme 5 --reference r", "credit.add"),
    "credit chargeback": ("acme 1 --reference r", "credit.charge_back"),
    "credit refund": ("{request} --amount 0.000000001", "credit.refund"),
    "credit correct": (
        "m --from {day} --to {day} --prices {prices} --reference c --post",
        "credit.correct",
    ),
    "organisation create": ("group", "organisation.create"),
    "organisation add": ("group acme", "organisation.add"),
    "organisation budget": ("group 100 --window day", "budget.create"),
    "organisation set": ("group --name holding", "organisation.change"),
    "organisation remove": ("holding acme", "organisation.remove"),
    "budget create": ("acme 25 --window day", "budget.create"),
    "budget set": ("2 --limit 30", "budget.change"),
    "budget end": ("2", "budget.end"),
    "limit set": ("acme --concurrent 3", "limit.set"),
    "limit remove": ("acme", "limit.remove"),
    "limit storage": ("acme --files 3", "storage.set"),
    "catalog price set": (
        "echo --account acme --component 'input_token 1' --component 'output_token 1' "
        "--from 2099-01-01T00:00Z",
        "price.set",
    ),
    "catalog price end": ("echo --account acme --from 2099-02-01T00:00Z", "price.end"),
    "catalog price cancel": ("echo --account acme --from 2099-02-01T00:00Z", "price.cancel"),
    "period close": ("{month}", "period.close"),
    "archive month": ("{month}", "period.archive"),
    "archive restore": ("{month}", "period.restore"),
    "invoice credit": ("{invoice} 0.01", "invoice.credit"),
    "rebate set": ("acme 1000=5", "rebate.set"),
    "reconcile": ("--rebuild", "ledger.rebuild"),
    "webhook resend": ("{request}", "webhook.resend"),
    "notices add": ("acme --url https://ops.example.com/hook", "notice.subscribe"),
    "notices test": ("1", "notice.test"),
    "notices remove": ("1", "notice.unsubscribe"),
    "aside retry": ("outcome one", "set_aside.retry"),
    "aside release": ("outcome two", "set_aside.release"),
    "worker drain": ("w-1", "worker.drain"),
    "worker resume": ("w-1", "worker.resume"),
    "worker unload": ("w-1 echo", "worker.unload"),
    "worker load": ("w-1 echo", "worker.load"),
    "queue cancel": ("{open}", "queue.cancel"),
    "queue requeue": ("", "queue.requeue"),
    "retention run": ("", "retention.run"),
    "erase": ("--tag a=b", "erasure.run"),
    "user create": ("Ann --email ann@example.com --role finance", "user.create"),
    "console link": ("ann@example.com", "link.create"),
    "user set": ("ann@example.com --role none", "user.change"),
    "member set": ("acme ann@example.com owner", "member.set"),
    "member remove": ("acme ann@example.com", "member.remove"),
    "key set": ("1 --spend-limit 3 --concurrent 2", "key.change"),
    "key rotate": ("1 --overlap-hours 1", "key.rotate"),
    "key revoke": ("1", "key.revoke"),
}
"""For each command that changes something: its arguments and its act, in an order that works."""


def leaves(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in subcommands(group, click.Context(group)):
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_command_either_reads_or_has_an_act() -> None:
    names = {name for name, _ in leaves(cli)}

    assert names == READING | RUNNING | ACTING.keys()
    assert READING.isdisjoint(ACTING)


@pytest.mark.parametrize("name", sorted(ACTING))
def test_every_command_that_acts_accepts_its_author(name: str) -> None:
    command = dict(leaves(cli))[name]

    assert "actor" in {parameter.name for parameter in command.params}


class Shell:
    """Runs commands in this process, on a SQLite database that the first of them makes."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        catalog, self.prices = home / "catalog.yaml", home / "prices.yaml"
        catalog.write_text(CATALOG.format(veo="0.40"))
        self.prices.write_text(
            "prices: {m: {price: [{unit: input_token, amount: '0.000000001'}]}}\n"
        )
        self._environment = {"TOLLGATE_HOME": str(home), "TOLLGATE_CATALOG": str(catalog)}
        self._url = f"sqlite:///{home / 'tollgate.db'}"

    def run(self, name: str, arguments: str) -> str:
        done = CliRunner().invoke(
            cli, [*name.split(), *shlex.split(arguments)], env=self._environment
        )
        assert done.exit_code == 0, f"{name}: {done.output} {done.exception!r}"
        return done.output

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        database = Database(self._url)
        try:
            yield database
        finally:
            database.dispose()

    def events(self) -> list[AuditEvent]:
        with self.database() as database, database.snapshot() as connection:
            return list_events(connection, AuditFilter(), limit=1000, oldest_first=True)


def test_every_command_that_changes_something_records_its_act(
    home: Path, monkeypatch: pytest.MonkeyPatch, valkey: str
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("REDIS_URL", valkey)
    monkeypatch.setenv("TOLLGATE_NAMESPACE", namespace := f"t{uuid.uuid4().hex[:8]}")
    asyncio.run(_announce_worker(valkey, namespace))
    shell = Shell(home)
    known: dict[str, str] = {"prices": str(shell.prices), "month": "2020-01", "invoice": "i-1"}
    known["day"] = f"{datetime.now(UTC):%Y-%m-%d}"
    seen: set[str] = set()

    for name, (arguments, act) in ACTING.items():
        more = " --reason because" if "--reason" in _options(name) else ""
        shell.run(name, f"{arguments.format(**known)} --actor ann{more}")

        new = [event for event in shell.events() if event.id not in seen]
        seen |= {event.id for event in new}
        acts = {
            # An archive is recorded when it is verified, and when the month's rows are removed.
            "archive month": [act, act],
            "reconcile": [act, "ledger.reconcile"],
        }
        assert [event.act for event in new] == acts.get(name, [act]), name
        for event in new:
            assert (event.actor, event.origin, event.key_id) == ("ann", "cli", None)
            assert event.reason == ("because" if more else ""), name
            assert event.before is not None or event.after is not None
        if name == "migrate":
            known["request"], known["open"] = _furnish(shell, known["invoice"])

    listed = shell.run("audit list", "--act account.change")
    assert "allowance 0 → 5" in listed
    shell.run("audit export", f"-o {home / 'audit.jsonl'}")
    assert len((home / "audit.jsonl").read_text().splitlines()) == len(seen)


def test_author_of_commands_can_come_from_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("TOLLGATE_ACTOR", "cron")
    shell = Shell(home)

    shell.run("migrate", "")
    shell.run("migrate", "")

    assert [(event.actor, event.act) for event in shell.events()] == [("cron", "database.migrate")]


def test_unknown_act_is_refused_with_those_that_exist(home: Path) -> None:
    shell = Shell(home)

    done = CliRunner().invoke(cli, ["audit", "list", "--act", "eat"], env=shell._environment)

    assert done.exit_code != 0


def _options(name: str) -> set[str]:
    return {text for one in dict(leaves(cli))[name].params for text in one.opts}


async def _announce_worker(url: str, namespace: str) -> None:
    redis = connect(url)
    announced = Announcement("w-1", states={"echo": ModelState()})
    await Workers(redis, namespace=namespace).announce(announced, ttl_s=600)
    await redis.aclose()


def _furnish(shell: Shell, invoice: str) -> tuple[str, str]:
    """Create what commands act on; return the ids of a charged request with a webhook, and of an
    open one."""
    with shell.database() as database:
        books = open_books(database, credit=10**9)
        placed, other = books.order(webhook="https://example.com/hook"), books.order()
        with database.transaction() as connection:
            hold(connection, [placed, other])
        books.settle(done(placed.request_id))
        with database.transaction() as connection:
            put_in_force(connection, "echo", Price((Component("request", 1),)), datetime.now(UTC))
            # A gateway that runs would have built the hourly sums of the month to be archived.
            build_hour(connection, datetime(2020, 1, 31, 23, tzinfo=UTC))
            add_note(connection, "outcome", "one", "a test")
            add_note(connection, "outcome", "two", "a test")
            connection.execute(
                insert(invoices).values(
                    number=invoice,
                    account_id=books.account.id,
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
    return str(placed.request_id), str(other.request_id)
