"""``tollgate catalog``: models and prices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.catalog.loader import check, load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.commands.prices import price, price_line, whatif_command
from gateway.commands.terminal import (
    example,
    json_option,
    print_rows,
    read_settings,
    refuse,
)
from gateway.pricing import format_usd


@click.group()
def catalog() -> None:
    """Models and prices."""


catalog.add_command(price)
catalog.add_command(whatif_command)


@catalog.command("check", epilog=example("tollgate catalog check catalog.yaml"))
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_option
def catalog_check(file: Path | None, as_json: bool) -> None:
    """Check a catalog file and report every mistake; exit with 1 if there is one."""
    path = file or read_settings().catalog
    problems = check(path)
    if as_json:
        click.echo(msgspec.json.encode([asdict(problem) for problem in problems]).decode())
    else:
        for problem in problems:
            click.echo(str(problem))
        if not problems:
            click.echo(f"{path}: {len(load_catalog(path).models)} models, no mistakes")
    if problems:
        raise SystemExit(1)


@catalog.command("show", epilog=example("tollgate catalog show pocket-chat --json"))
@click.argument("name", required=False)
@json_option
def catalog_show(name: str | None, as_json: bool) -> None:
    """Show models with their prices."""
    entries = load_catalog(read_settings().catalog).models
    if name is not None:
        entries = tuple(entry for entry in entries if entry.name == name)
        if not entries:
            refuse(f"the catalog has no model {name!r}")
    print_rows(entries, _entry_row, as_json)


def _entry_row(entry: CatalogEntry) -> dict[str, Any]:
    lines = [price_line(line.unit, format_usd(line.amount), line.per) for line in entry.price]
    return {
        "name": entry.name,
        "task": entry.task,
        "route": entry.engine or "upstream",
        "price": lines,
    }
