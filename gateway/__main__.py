"""The ``tollgate`` command, by which operators run and manage an installation.

Prints tables and, with ``--json``, JSON. Exit status: 0 success, 1 refused or a problem was found,
2 the command line is not valid. An error is one line. What a command needs is imported when it
runs: SQL takes longer to import than ``tollgate up`` takes to start its first child.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import asdict
from typing import Final

import click

from gateway.catalog.problems import CatalogError
from gateway.commands.terminal import (
    LazyCommands,
    actor_option,
    command_author,
    example,
    json_option,
    open_database,
    print_json,
    print_rows,
    read_settings,
    refuse,
)
from gateway.errors import TollgateError
from gateway.settings import Settings

COMMANDS: Final = {
    "account": "accounts:account",
    "archive": "archive:archive",
    "aside": "aside:aside",
    "audit": "audit:audit",
    "budget": "limits:budget",
    "catalog": "catalog:catalog",
    "console": "console:console",
    "credit": "credit:credit",
    "erase": "erase:erase_command",
    "export": "reports:export_command",
    "feedback": "feedback:feedback_commands",
    "gateway": "running.gateway:gateway",
    "invoice": "periods:invoice",
    "key": "accounts:key",
    "ledger": "reports:ledger_command",
    "limit": "limits:limit",
    "margin": "reports:margin_command",
    "member": "users:member",
    "model": "planning.add_model:model",
    "notices": "notices:notices",
    "organisation": "organisations:organisation",
    "period": "periods:period",
    "plan": "planning.plan:plan_command",
    "queue": "running.queue:queue",
    "rebate": "periods:rebate",
    "reconcile": "reports:reconcile_command",
    "request": "reports:request",
    "retention": "retention:retention",
    "try": "planning.try_model:try_command",
    "upstream": "upstream:upstream",
    "usage": "reports:usage_command",
    "user": "users:user",
    "webhook": "webhooks:webhook",
    "worker": "running.worker:worker",
}
"""Where each command is found in ``gateway.commands``; only the command that runs is imported."""


@click.group(
    cls=LazyCommands,
    package="gateway.commands",
    places=COMMANDS,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
def cli() -> None:
    """Tollgate: a self-hosted inference gateway with per-request pricing.

    Settings come from the environment: TOLLGATE_HOME, TOLLGATE_PORT, DATABASE_URL, REDIS_URL, …
    """


@cli.command(epilog=example("TOLLGATE_PORT=9000 tollgate up"))
@click.option(
    "--console-link/--no-console-link",
    default=True,
    help="Whether to print a one-time link to the console, if no operator is in it.",
)
def up(console_link: bool) -> None:
    """Run everything on this machine: queue server, gateway and a worker, in the foreground."""
    from gateway.up.children import CannotStart
    from gateway.up.embedded import run

    try:
        run(read_settings(), console_link=console_link)
    except CannotStart as error:
        refuse(str(error))


@cli.command(
    epilog=example("tollgate doctor", "DATABASE_URL=postgresql://… tollgate doctor --json")
)
@json_option
def doctor(as_json: bool) -> None:
    """Examine this machine and installation, running or not: what is wrong or slow, and what to do.

    Exits with 1 if there is a problem. Warnings do not count.
    """
    from gateway.doctor.examination import examine

    has_problem = False
    found = []
    for one in examine(read_settings()):
        has_problem = has_problem or one.level == "problem"
        found.append(asdict(one))
        if not as_json:
            click.echo(f"{one.level:8} {one.part:9} {one.found}")
            if one.advice:
                click.echo(f"{'':18} → {one.advice}")
    if as_json:
        print_json(found)
    raise SystemExit(1 if has_problem else 0)


@cli.command("settings", epilog=example("tollgate settings console", "tollgate settings --changed"))
@click.argument("words", nargs=-1)
@click.option("--changed", is_flag=True, help="Only those that differ from their default.")
@json_option
def settings_command(words: tuple[str, ...], changed: bool, as_json: bool) -> None:
    """Show settings with WORDS in their name or meaning: value, origin and default.

    Then what is risky about all of them. Secrets are `set` or not; no secret is printed.
    """
    from gateway.doctor.settings_report import describe, is_changed, matching, risks

    settings = read_settings()
    found = matching(describe(settings), " ".join(words))
    found = [one for one in found if is_changed(one)] if changed else found
    if as_json:
        print_json({"settings": found, "risks": [asdict(one) for one in risks(settings)]})
        return
    print_rows(
        found, lambda one: {k: one[k] for k in ("name", "value", "origin", "default")}, False
    )
    for risk in risks(settings):
        click.echo(f"{risk.level:8} {risk.part}: {risk.found}\n{'':9}→ {risk.advice}")


@cli.command(epilog=example("tollgate up &", "tollgate demo", "tollgate console link"))
@click.option(
    "--days",
    type=click.IntRange(0, 60),
    default=30,
    show_default=True,
    help="Number of older days, booked before today's requests.",
)
@click.option(
    "--beside", is_flag=True, help="Also beside other accounts with money; cannot be undone."
)
def demo(days: int, beside: bool) -> None:
    """Fill a new installation: accounts, older days, and real requests of all tasks.

    For trying out the console, and for demonstrations. It uses the gateway that runs here, or runs
    `tollgate up` meanwhile.
    """
    from gateway.demo.run import Demo, NotMade

    settings = read_settings()
    try:
        Demo(settings, days, beside, click.echo).make()
    except NotMade as error:
        refuse(str(error))


@cli.command(
    epilog=example("REDIS_URL=redis://10.0.0.5 DATABASE_URL=postgresql://… tollgate serve")
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    help="Gateway processes, which share the port; default: TOLLGATE_PROCESSES, or 1.",
)
@click.option(
    "--descriptor",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Serve on an inherited listening socket with this file descriptor, in one process.",
)
@click.option(
    "--prepare",
    is_flag=True,
    hidden=True,
    help="First migrate the database and create a first account; for `tollgate up`.",
)
@click.option(
    "--console",
    "is_console",
    is_flag=True,
    hidden=True,
    help="Serve the console alone, on an inherited Unix socket.",
)
@click.option(
    "--console-socket",
    metavar="PATH",
    hidden=True,
    help="Socket of the process that serves the console.",
)
def serve(
    processes: int | None,
    descriptor: int | None,
    prepare: bool,
    is_console: bool,
    console_socket: str | None,
) -> None:
    """Run the gateway alone; queue, database and workers run elsewhere."""
    settings = read_settings()
    settings.queue_url  # noqa: B018  # fail immediately if it is missing
    if is_console:
        pass  # the gateway that started it has checked the database
    elif prepare:
        from gateway.up import first_start

        first_start.prepare(settings)
    else:
        with open_database(settings):
            pass
    from gateway.server.several import serve_in_processes
    from gateway.server.single import serve as serve_here
    from gateway.server.single import serve_console

    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # URLs from clients can contain secrets.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    count = processes or settings.processes
    if descriptor is not None:
        if is_console:
            serve_console(settings, descriptor)
        else:
            serve_here(settings, descriptor=descriptor, console_socket=console_socket)
        return
    _warn_of_missing_url(settings)
    if count == 1:
        serve_here(settings)
    else:
        serve_in_processes(settings, count)


def _warn_of_missing_url(settings: Settings) -> None:
    if settings.host in ("0.0.0.0", "::") and settings.public_url is None:
        logging.getLogger(__name__).warning(
            "TOLLGATE_PUBLIC_URL is not set: URLs in webhooks and batch files begin with "
            "http://%s:%d, and all others with the Host header of the call",
            settings.host,
            settings.port,
        )


@cli.command("migrate", epilog=example("DATABASE_URL=postgresql://… tollgate migrate"))
@actor_option
def migrate_command() -> None:
    """Migrate the database to the schema of this version."""
    from gateway.operations.database import record_migration
    from gateway.sql.database import migrate

    settings = read_settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    recorded = functools.partial(record_migration, author=command_author())
    migrate(settings.sql_url, prepare=settings.database_prepare, migrated=recorded)
    click.echo("the database is up to date")


def main() -> None:
    """Run the command; print errors that an operator can fix in one line."""
    try:
        cli(prog_name="tollgate")
    except (LookupError, ValueError) as error:
        refuse(str(error.args[0] if error.args else error))
    except TollgateError as error:
        refuse(error.message)
    except CatalogError as error:
        refuse(str(error))
    except OverflowError:
        refuse("a number or a moment is out of range")
    except FileNotFoundError as error:
        is_catalog = str(error.filename) == str(read_settings().catalog)
        hint = "; set TOLLGATE_CATALOG to the path of your catalog" if is_catalog else ""
        refuse(f"{error.strerror}: {error.filename}{hint}" if error.filename else str(error))
    except OSError as error:
        refuse(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except Exception as error:
        from sqlalchemy.exc import DBAPIError

        if not isinstance(error, DBAPIError):
            raise
        refuse(f"the database failed: {error.orig}")


if __name__ == "__main__":
    main()
