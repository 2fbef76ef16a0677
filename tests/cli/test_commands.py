"""The ``tollgate`` command: JSON, exit codes, errors of one line, help with an example."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from sqlalchemy import update

from gateway.__main__ import cli
from gateway.commands.terminal import subcommands
from gateway.ledger.holds import hold
from gateway.ledger.prices import put_in_force, set_price
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.webhooks import webhook_deliveries
from tests.cli.here import run_here
from tests.databases import migrated_file
from tests.ledger.books import done, open_books


class Command:
    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True)
        self.url = f"sqlite:///{home / 'tollgate.db'}"

    def run(self, *arguments: str, status: int = 0) -> str:
        home = {"TOLLGATE_HOME": str(self.home), "REDIS_URL": None, "DATABASE_URL": None}
        done = run_here(arguments, home)
        assert done.exit_code == status, done.stderr
        return done.stdout if status == 0 else done.stdout + done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, of which each test gets a copy."""
    made = tmp_path_factory.mktemp("template") / "tollgate.db"
    database = Database(migrated_file(made))
    with database.transaction() as connection:
        # Limits and budgets are only set for a model that has been on sale.
        put_in_force(connection, "echo", Price((Component("request", 1),)), datetime.now(UTC))
    database.dispose()
    return made


@pytest.fixture
def command(home: Path, template: Path) -> Command:
    made = Command(home)
    shutil.copy(template, home / "tollgate.db")
    return made


def commands(group: click.Group, path: str = "") -> Iterator[str]:
    for name, command in subcommands(group, click.Context(group)):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}"


@pytest.mark.parametrize("name", list(commands(cli)))
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="tollgate")

    assert shown.exit_code == 0
    assert f"tollgate {name}" in shown.output.split("Example:")[1]


def test_webhook_deliveries_are_listed_and_sent_again(command: Command) -> None:
    database = Database(command.url)
    books = open_books(database, credit=10_000_000)
    placed = books.order(webhook="https://example.com/hook")
    with database.transaction() as connection:
        hold(connection, [placed])
    books.settle(done(placed.request_id))
    with database.transaction() as connection:
        connection.execute(
            update(webhook_deliveries).values(outcome="failed", ended_at=datetime.now(UTC))
        )
    database.dispose()

    [listed] = command.json("webhook", "list", "--status", "failed")
    assert (listed["request_id"], listed["status"]) == (placed.request_id, "failed")
    [again] = command.json("webhook", "resend", placed.request_id)
    assert again["status"] == "pending"
    assert command.json("webhook", "list", "--status", "failed") == []
    assert "No webhook delivery" in command.run("webhook", "resend", "req_x", status=1)


@pytest.mark.parametrize("amount", ["-5", "-25.50", "-0.1"])
def test_negative_amount_is_reported_as_such(command: Command, amount: str) -> None:
    command.run("account", "create", "acme")

    for arguments in (
        ("budget", "create", "acme", amount, "--window", "day"),
        ("credit", "add", "acme", amount, "--reason", "x", "--reference", "x"),
    ):
        assert "amounts cannot be negative" in command.run(*arguments, status=2)
    assert "No such option '-x'" in command.run("account", "list", "-x", status=2)


def test_cancelled_price_is_still_listed(command: Command) -> None:
    database = Database(command.url)
    with database.transaction() as connection:
        set_price(
            connection, "echo", Price((Component("request", 9),)),
            starts_at=datetime(2099, 1, 1, tzinfo=UTC), actor="x", reason="typing error",
        )  # fmt: skip
    database.dispose()
    cancel = ("catalog", "price", "cancel", "echo", "--from", "2099-01-01T00:00Z", "--reason", "r")

    [cancelled] = command.json(*cancel)

    assert (cancelled["cancelled"]["actor"], cancelled["cancelled"]["reason"]) == ("operator", "r")
    begun, listed = command.json("catalog", "price", "list", "echo")
    assert (begun["cancelled"], listed) == (None, cancelled)
    assert "none is scheduled" in command.run(*cancel, status=1)
    assert "not a valid moment" in command.run(*cancel[:5], "soon", *cancel[6:], status=1)


def test_account_is_created_with_credit_and_a_key(command: Command) -> None:
    [made] = command.json("account", "create", "acme", "--credit-limit", "1.5")
    assert (made["posted"], made["available"]) == ("0", "1.5")

    credit = ("credit", "add", "acme", "2.25", "--reason", "invoice", "--reference", "i1")
    assert command.json(*credit)[0]["repeated"] is False
    assert command.json(*credit)[0]["repeated"] is True
    assert command.json("account", "show", "acme")[0]["available"] == "3.75"

    key = command.json("key", "create", "acme", "--spend-limit", "0.5", "--scope", "inference")
    assert key["secret"].startswith("tg_")
    assert "secret" not in command.run("key", "list", "acme", "--json")
    assert command.json("key", "revoke", key["prefix"])[0]["revoked_at"]
    assert command.run("reconcile").strip() == "the ledger is consistent"


def test_budgets_are_created_listed_changed_and_ended(command: Command) -> None:
    command.run("account", "create", "acme")
    key = command.json("key", "create", "acme")

    [made] = command.json(
        *("budget", "create", "acme", "25.5", "--window", "day", "--tz", "Europe/Berlin"),
        *("--key", key["prefix"], "--model", "echo", "--soft", "--name", "trial"),
    )

    assert (made["limit"], made["remaining"], made["hard"]) == ("25.5", "25.5", False)
    assert (made["key"], made["model"], made["tz"]) == (key["id"], "echo", "Europe/Berlin")
    assert command.json("budget", "list", "acme") == [made]
    [changed] = command.json("budget", "set", str(made["id"]), "--limit", "40", "--hard")
    assert changed == {**made, "limit": "40", "remaining": "40", "hard": True}
    assert command.json("budget", "end", str(made["id"])) == [changed]
    assert command.json("budget", "list") == []


def test_limits_are_set_listed_and_removed(command: Command) -> None:
    command.run("account", "create", "acme")
    key = command.json("key", "create", "acme", "--requests-per-minute", "5")
    whole = ("limit", "set", "acme", "--concurrent", "3")

    [made] = command.json(*whole, "--model", "echo", "--tokens-per-minute", "900")
    command.run(*whole, "--key", key["prefix"])

    assert made == {
        "object": "rate_limit",
        "account": "acme",
        "key": None,
        "model": "echo",
        "requests_per_minute": None,
        "tokens_per_minute": 900,
        "concurrent": 3,
        "cancelled_seconds_per_hour": None,
    }
    # Setting a limit replaces all that it had: the key's five per minute are gone.
    of_key = {**made, "key": key["id"], "model": None, "tokens_per_minute": None}
    assert command.json("limit", "list", "acme") == [made, of_key]
    assert command.json("limit", "remove", "acme", "--model", "echo") == [made]
    assert command.json("limit", "list") == [of_key]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("account", "show", "nobody"), 1, "Unknown account 'nobody'"),
        (("key", "create", "nobody"), 1, "Unknown account"),
        (("key", "revoke", "tg_unknown"), 1, "No key found"),
        (("credit", "add", "nobody", "1", "--reason", "x"), 1, "Unknown account"),
        (("credit", "add", "x", "one", "--reason", "x"), 2, "is not a valid amount"),
        (("budget", "end", "7"), 1, "Unknown budget 7"),
        (("budget", "set", "7"), 2, "nothing to change"),
        (("limit", "remove", "nobody"), 1, "Unknown account 'nobody'"),
        (("limit", "set", "x", "--concurrent", "0"), 2, "not in the range"),
        (("catalog", "check", "nowhere.yaml"), 1, "cannot be read"),
        (("serve",), 1, "REDIS_URL is not set"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], status: int, message: str, command: Command
) -> None:
    assert message in command.run(*arguments, status=status).strip().splitlines()[-1]


def test_reconcile_exits_with_1_if_balances_differ(command: Command) -> None:
    command.run("account", "create", "acme")
    database = Database(command.url)
    with database.transaction() as connection:
        connection.exec_driver_sql("UPDATE accounts SET posted_nanos = 5 WHERE name = 'acme'")
    database.dispose()

    assert "R2 account" in command.run("reconcile", status=1)


def test_command_elsewhere_says_where_an_installation_is_expected(home: Path) -> None:
    said = Command(home).run("account", "list", status=1)

    assert said.count("\n") == 1
    assert f"there is no installation at {home / 'tollgate.db'}" in said
    assert "TOLLGATE_HOME" in said
    assert not (home / "tollgate.db").exists()


def test_missing_catalog_is_reported_with_its_setting(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(command.home)

    assert "TOLLGATE_CATALOG" in command.run("catalog", "show", status=1)


def test_price_of_an_unknown_unit_is_refused_in_the_words_of_the_catalog(command: Command) -> None:
    wrong = ("--component", "token 0.1", "--reason", "x")

    said = command.run("catalog", "price", "set", "pocket-chat", *wrong, status=1)

    assert "price[0].unit: 'token' is unknown; did you mean input_token?" in said
    assert "Tuple" not in said


def test_receipt_of_any_account_is_shown(command: Command) -> None:
    database = Database(command.url)
    books = open_books(database, credit=10_000_000)
    placed = books.order()
    with database.transaction() as connection:
        hold(connection, [placed])
    assert "is still queued" in command.run("request", "show", placed.request_id, status=1)
    books.settle(done(placed.request_id))
    database.dispose()

    shown = command.run("request", "show", placed.request_id)
    receipt = command.json("request", "show", placed.request_id)

    assert f"${receipt['cost']}" in shown
    assert (receipt["account"], receipt["outcome"]) == (books.account.name, "charged")
    assert "There is no request" in command.run("request", "show", "req_x", status=1)


def test_commands_refuse_a_database_without_the_schema(home: Path) -> None:
    made = Command(home)
    (home / "tollgate.db").touch()

    assert "run: tollgate migrate" in made.run("account", "list", status=1)
    made.run("migrate")
    assert made.json("account", "list") == []


def test_cut_list_says_how_to_continue(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        command.run("account", "create", name)
    monkeypatch.setenv("TOLLGATE_HOME", str(command.home))

    shown = CliRunner().invoke(cli, ["account", "list", "--limit", "1", "--json"])

    (first,) = json.loads(shown.stdout)
    assert shown.stderr == f"there are more: continue with --after {first['id']}\n"
    rest = command.json("account", "list", "--after", str(first["id"]))
    assert [one["name"] for one in rest] == ["two"]


def test_catalog_is_shown_with_routes_and_the_conditions_of_prices() -> None:
    shown = CliRunner().invoke(cli, ["catalog", "show", "--json"])

    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert "$0.0008 per image quality=high" in rows["pocket-image"]["price"]
    assert rows["pocket-image"]["route"] == "diffusion"
    assert rows["pocket-talking-head"]["route"] == "workflow"
    assert rows["pocket-talking-head"]["price"] == ["the sum of its steps"]
    assert (rows["Veo3"]["route"], rows["Veo3"]["typical"]) == ("upstream", "$0.4")


def test_picks_are_a_table_and_json() -> None:
    asked = ["catalog", "pick", "product", "photos", "--budget", "0.05"]
    table = CliRunner().invoke(cli, asked).stdout.splitlines()
    found = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)

    assert [line.split()[:2] for line in table[1:]] == [
        ["best", "bria-fibo-relight"],
        ["better", "seedream-5.0-lite"],
        ["today", "pocket-image"],
    ]
    assert found["best"]["typical_price"] == "0.000001"
    unknown = CliRunner().invoke(cli, ["catalog", "show", "pocket-imag"])
    assert "did you mean pocket-image?" in unknown.stderr
