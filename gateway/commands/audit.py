"""``tollgate audit``: who did what, when and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click

from gateway.audit_log import ACTS, Origin
from gateway.checks.moments import read_moment
from gateway.commands.terminal import (
    UtcTime,
    example,
    json_option,
    print_page,
    snapshot,
    write_pages,
)
from gateway.operations.audit import FORMATS, AuditEventView, Format, export_page, list_page
from gateway.operations.audit import read_filter as filter_of

F = TypeVar("F", bound=Callable[..., Any])

FILTERS: Final = (
    click.argument("account", metavar="[ACCOUNT]", required=False),
    click.option("--act", metavar="ACT", help="Only this act, such as key.create."),
    click.option("--subject", help='Only this subject, such as "key 7" or "account 3".'),
    click.option("--by", "actor", help="Only acts of this author: a key's prefix or a name."),
    click.option("--origin", type=click.Choice(get_args(Origin)), help="Only acts from here."),
    click.option("--call", "call_id", metavar="ID", help="Only acts of this call or command."),
    click.option("--from", "first", type=UtcTime(), help="First moment, in UTC."),
    click.option("--to", "last", type=UtcTime(), help="Moment before which they end, in UTC."),
)


def filtered(command: F) -> F:
    """Add the options of a filter."""
    for option in reversed(FILTERS):
        command = option(command)
    return command


@click.group()
def audit() -> None:
    """The audit log: administrative acts with their authors."""


@audit.command(
    "list",
    epilog=example(
        "tollgate audit list acme --act key.revoke", "tollgate audit list --by tga_x4Lq81z --json"
    ),
)
@filtered
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Number of rows."
)
@click.option("--before", "cursor", metavar="EVENT", help="Only events older than this one.")
@json_option
def audit_list(limit: int, cursor: str | None, as_json: bool, **entered: Any) -> None:
    """List acts, newest first: of one account or of all."""
    with snapshot() as connection:
        wanted = filter_of(connection, **_read(entered))
        page = list_page(connection, wanted, limit=limit, cursor=cursor)
    print_page(page, _row, as_json, "--before")


@audit.command(
    "export", epilog=example("tollgate audit export --from 2026-01-01 --format csv -o audit.csv")
)
@filtered
@click.option("--format", type=click.Choice(FORMATS), default="jsonl", show_default=True)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.",
)
def audit_export(format: Format, output: Path, **entered: Any) -> None:
    """Write acts to a file, oldest first."""
    entered["last"] = entered["last"] or datetime.now(UTC).isoformat()
    with snapshot() as connection, open(output, "wb") as file:
        wanted = filter_of(connection, **_read(entered))
        write_pages(file, export_page, connection, wanted, format=format)
    click.echo(f"{output}: {output.stat().st_size} bytes")


def _read(entered: Mapping[str, Any]) -> dict[str, Any]:
    act = entered["act"]
    if act is not None and act not in ACTS:
        raise click.UsageError(f"unknown act {act!r}; use one of {', '.join(ACTS)}")
    first, last = entered["first"], entered["last"]
    filters = {name: value for name, value in entered.items() if name not in ("first", "last")}
    return {
        **filters,
        "starts_at": read_moment(first) if first else None,
        "ends_at": read_moment(last) if last else None,
    }


def _row(view: AuditEventView) -> dict[str, Any]:
    return {
        "at": view["at"],
        "act": view["act"],
        "subject": view["subject"],
        "by": view["actor"],
        "origin": view["origin"],
        "changed": _change(view),
        "reason": view["reason"],
    }


def _change(view: AuditEventView) -> str:
    """Describe what an act changed: ``status active → suspended``."""
    before, after = view["before"], view["after"]
    if before is None or after is None:
        return ""
    return ", ".join(f"{name} {before.get(name)} → {after.get(name)}" for name in after)
