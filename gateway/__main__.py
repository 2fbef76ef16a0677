"""The ``tollgate`` command: everything that an operator does to an installation.

Prints tables for people and, with ``--json``, data for programs. Exit status: 0 done, 1 refused or
something found wrong, 2 the command itself was wrong. An error is one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
from pydantic import ValidationError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from gateway import embedded
from gateway.accounts.accounts import (
    Account,
    AccountExists,
    create_account,
    find_account,
    list_accounts,
)
from gateway.accounts.keys import SCOPES, KeyInfo, create_key, list_keys, revoke_key
from gateway.accounts.pepper import read_pepper
from gateway.catalog.loader import CatalogError, check, load_catalog
from gateway.catalog.schema import Entry
from gateway.database import Database, migrate, schema_is_current
from gateway.embedded import CannotStart
from gateway.ledger.reconcile import reconcile
from gateway.ledger.transfers import CreditKind, TransferConflict, add_credit
from gateway.pricing import format_usd, parse_usd
from gateway.settings import Settings

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Usd(click.ParamType[int]):
    """An amount of USD as a decimal, in nano-dollars."""

    name = "USD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_usd(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Tollgate: a self-hosted inference gateway with per-request pricing.

    Settings come from the environment: TOLLGATE_HOME, TOLLGATE_PORT, DATABASE_URL, REDIS_URL, …
    """


@cli.command(epilog=example("TOLLGATE_PORT=9000 tollgate up"))
def up() -> None:
    """Run everything on this machine: queue server, gateway and a worker, in the foreground."""
    embedded.run(_settings())


@cli.command(
    epilog=example("REDIS_URL=redis://10.0.0.5 DATABASE_URL=postgresql://… tollgate serve")
)
def serve() -> None:
    """Run the gateway alone; queue, database and workers run elsewhere."""
    import uvicorn  # the other commands need no web server

    from gateway.app import create_app

    settings = _settings()
    settings.queue_url  # noqa: B018  # says at once if it is missing
    with _database(settings):
        pass
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # A committed transaction wakes its waiters sooner; the default lets a busy loop keep 5 ms.
    sys.setswitchinterval(0.0005)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
    )


@cli.command("migrate", epilog=example("DATABASE_URL=postgresql://… tollgate migrate"))
def migrate_command() -> None:
    """Bring the database to the schema of this version."""
    settings = _settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    migrate(settings.sql_url)
    click.echo("the database is up to date")


@cli.group()
def account() -> None:
    """Accounts: who pays."""


@account.command("create", epilog=example("tollgate account create acme --credit-limit 10"))
@click.argument("name")
@click.option("--credit-limit", type=Usd(), default=0, help="USD the balance may fall below zero.")
@json_option
def account_create(name: str, credit_limit: int, as_json: bool) -> None:
    """Open an account."""
    with _transaction() as connection:
        made = create_account(connection, name, credit_limit_nanos=credit_limit)
    _print([made], _account_row, as_json)


@account.command("list", epilog=example("tollgate account list --json"))
@json_option
def account_list(as_json: bool) -> None:
    """List accounts with their balances."""
    with _transaction() as connection:
        found = list_accounts(connection)
    _print(found, _account_row, as_json)


@account.command("show", epilog=example("tollgate account show acme"))
@click.argument("name")
@json_option
def account_show(name: str, as_json: bool) -> None:
    """Show one account, by name or number."""
    with _transaction() as connection:
        found = find_account(connection, name)
    _print([found], _account_row, as_json)


@cli.group()
def key() -> None:
    """API keys: who calls."""


@key.command(
    "create",
    epilog=example("tollgate key create acme --name ci --spend-limit 2.50 --scope inference"),
)
@click.argument("account_name", metavar="ACCOUNT")
@click.option("--name", default="", help="What it is for.")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), help="[inference and read]"
)
@click.option("--expires", type=click.DateTime(), help="When it ends, in UTC.")
@click.option("--requests-per-minute", type=int)
@click.option("--tokens-per-minute", type=int)
@click.option("--spend-limit", type=Usd(), help="USD that it may spend in all.")
@json_option
def key_create(
    account_name: str,
    name: str,
    scopes: Sequence[str],
    expires: datetime | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    spend_limit: int | None,
    as_json: bool,
) -> None:
    """Make a key and show its secret, this once."""
    pepper = read_pepper(_settings())
    with _transaction() as connection:
        owner = find_account(connection, account_name)
        secret, made = create_key(
            connection,
            owner.id,
            pepper=pepper,
            name=name,
            scopes=scopes or ("inference", "read"),
            expires_at=expires.replace(tzinfo=UTC) if expires else None,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            spend_limit_nanos=spend_limit,
        )
    if as_json:
        click.echo(msgspec.json.encode({**_key_row(made), "secret": secret}).decode())
    else:
        click.echo(secret)
        click.echo("This is shown once and stored nowhere.", err=True)


@key.command("list", epilog=example("tollgate key list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def key_list(account_name: str | None, as_json: bool) -> None:
    """List keys, of one account or of all."""
    with _transaction() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        found = list_keys(connection, owner)
    _print(found, _key_row, as_json)


@key.command("revoke", epilog=example("tollgate key revoke tg_x4Lq81z"))
@click.argument("prefix", metavar="PREFIX|ID")
@json_option
def key_revoke(prefix: str, as_json: bool) -> None:
    """Revoke a key, at once and in every gateway."""
    with _transaction() as connection:
        found = revoke_key(connection, prefix)
    _print([found], _key_row, as_json)


@cli.group()
def credit() -> None:
    """Money that comes into accounts."""


@credit.command(
    "add", epilog=example('tollgate credit add acme 25 --reason "invoice 17" --reference inv-17')
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option("--reason", required=True, help="Why; it stands in the ledger for ever.")
@click.option("--kind", type=click.Choice(["topup", "grant"]), default="topup", show_default=True)
@click.option("--reference", help="The payer's reference; the same one is booked once.")
@click.option("--actor", default="operator", show_default=True, help="Who does it.")
@json_option
def credit_add(
    account_name: str,
    amount: int,
    reason: str,
    kind: CreditKind,
    reference: str | None,
    actor: str,
    as_json: bool,
) -> None:
    """Add credit to an account: paid (topup) or given (grant)."""
    with _transaction() as connection:
        owner = find_account(connection, account_name)
        booked = add_credit(
            connection,
            owner.id,
            amount,
            kind=kind,
            key=f"{kind}:{reference or secrets.token_hex(12)}",
            actor=actor,
            reason=reason,
        )
    row = {
        "transfer": booked.id,
        "account": owner.name,
        "amount": format_usd(booked.amount_nanos),
        "balance": format_usd(booked.posted_after),
        "repeated": booked.repeated,
    }
    _print([row], dict, as_json)


@cli.group()
def catalog() -> None:
    """The catalog file."""


@catalog.command("check", epilog=example("tollgate catalog check catalog.yaml"))
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_option
def catalog_check(file: Path | None, as_json: bool) -> None:
    """Say everything that is wrong with a catalog file; exit with 1 if anything is."""
    path = file or _settings().catalog
    problems = check(path)
    if as_json:
        click.echo(msgspec.json.encode([asdict(problem) for problem in problems]).decode())
    else:
        for problem in problems:
            click.echo(str(problem))
        if not problems:
            click.echo(f"{path}: {len(load_catalog(path).models)} models, nothing wrong")
    if problems:
        raise SystemExit(1)


@catalog.command("show", epilog=example("tollgate catalog show pocket-chat --json"))
@click.argument("name", required=False)
@json_option
def catalog_show(name: str | None, as_json: bool) -> None:
    """Show what is on sale, with prices."""
    entries = load_catalog(_settings().catalog).models
    if name is not None:
        entries = tuple(entry for entry in entries if entry.name == name)
        if not entries:
            _refuse(f"the catalog has no model {name!r}")
    _print(entries, _entry_row, as_json)


@cli.command("reconcile", epilog=example("tollgate reconcile --json"))
@json_option
def reconcile_command(as_json: bool) -> None:
    """Prove that the books agree; say what differs, and exit with 1 if anything does."""
    with _transaction() as connection:
        findings = reconcile(connection, now=datetime.now(UTC))
    if as_json:
        click.echo(msgspec.json.encode([asdict(finding) for finding in findings]).decode())
    else:
        for finding in findings:
            click.echo(str(finding))
        if not findings:
            click.echo("the books agree")
    if findings:
        raise SystemExit(1)


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        _refuse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", status=2)


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sql_url)
    try:
        if not schema_is_current(database.engine):
            _refuse("the database is not at the schema of this version; run: tollgate migrate")
        yield database
    finally:
        asyncio.run(database.close())


@contextlib.contextmanager
def _transaction() -> Iterator[Connection]:
    with _database(_settings()) as database, database.transaction() as connection:
        yield connection


def _print(items: Sequence[Any], row: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    rows = [row(item) for item in items]
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        return
    cells = [list(rows[0]), *[[_cell(value) for value in one.values()] for one in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)


def _account_row(found: Account) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "status": found.status,
        "posted": format_usd(found.posted_nanos),
        "held": format_usd(found.held_nanos),
        "available": format_usd(found.available_nanos),
        "credit_limit": format_usd(found.credit_limit_nanos),
    }


def _key_row(found: KeyInfo) -> dict[str, Any]:
    limit = found.spend_limit_nanos
    return {
        "id": found.id,
        "prefix": found.prefix,
        "account": found.account,
        "name": found.name,
        "scopes": sorted(found.scopes),
        "status": "revoked" if found.revoked_at else "active",
        "expires_at": found.expires_at.isoformat() if found.expires_at else None,
        "spent": format_usd(found.spent_nanos),
        "spend_limit": format_usd(limit) if limit is not None else None,
    }


def _entry_row(entry: Entry) -> dict[str, Any]:
    price = [
        f"${format_usd(line.amount)} per {line.per if line.per > 1 else ''} {line.unit}".replace(
            "  ", " "
        )
        for line in entry.price
    ]
    return {
        "name": entry.name,
        "task": entry.task,
        "route": entry.engine or "upstream",
        "price": price,
    }


def _refuse(reason: str, *, status: int = 1) -> NoReturn:
    click.echo(f"tollgate: {reason}", err=True)
    raise SystemExit(status)


def main() -> None:
    """Run the command; turn what an operator can mend into one line."""
    try:
        cli(prog_name="tollgate")
    except (CannotStart, AccountExists, TransferConflict, LookupError, ValueError) as error:
        _refuse(str(error.args[0] if error.args else error))
    except CatalogError as error:
        _refuse(str(error))
    except DBAPIError as error:
        _refuse(f"the database failed: {error.orig}")
    except OSError as error:
        _refuse(f"{error.strerror}: {error.filename}" if error.filename else str(error))


if __name__ == "__main__":
    main()
