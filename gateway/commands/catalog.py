"""``tollgate catalog``: models and prices."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.catalog.editing.changes import CatalogChange
from gateway.catalog.editing.draft import diff_view, examine
from gateway.catalog.loader import check, load_catalog
from gateway.catalog.picking.pick import RESULTS, pick, read_wish
from gateway.catalog.picking.typical import Find, typical_nanos
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.views import PickedView
from gateway.checks.suggestions import did_you_mean
from gateway.commands.planning.deep_check import inspect_checkpoints
from gateway.commands.prices import price, price_line, whatif_command
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    print_json,
    print_rows,
    read_settings,
    refuse,
)
from gateway.pricing import format_usd, parse_usd


@click.group()
def catalog() -> None:
    """Models and prices."""


catalog.add_command(price)
catalog.add_command(whatif_command)


@catalog.command("check", epilog=example("tollgate catalog check --deep catalog.yaml"))
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--deep", is_flag=True, help="Whether engines here can load the checkpoints.")
@json_option
def catalog_check(file: Path | None, deep: bool, as_json: bool) -> None:
    """Check a catalog file, also against the contracts and costs of upstreams.

    With --deep, engines read the configuration, tokenizer, options, device and memory of each entry
    that they would serve, but no weights. Run it on the machine of the worker.

    Exits with 1 if there is a mistake. Warnings do not count.
    """
    path = file or read_settings().catalog
    problems = check(path, inspect_checkpoints if deep else None)
    if as_json:
        click.echo(msgspec.json.encode([asdict(problem) for problem in problems]).decode())
    else:
        for problem in problems:
            click.echo(str(problem))
        if not any(problem.level == "error" for problem in problems):
            models = len(load_catalog(path).models)
            click.echo(f"{path}: {models} models, {_counted(len(problems))}")
    if any(problem.level == "error" for problem in problems):
        raise SystemExit(1)


@catalog.command("diff", epilog=example("tollgate catalog diff new-catalog.yaml"))
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@json_option
def catalog_diff(file: Path, as_json: bool) -> None:
    """Check FILE, and show what it would change for customers in place of the catalog file.

    Prices, models, limits and choices, and inputs of workflows. Changes nothing. Exits with 1 if
    FILE cannot be loaded.
    """
    path = read_settings().catalog
    draft = examine(file.read_bytes(), path, load_catalog(path).models)
    if as_json:
        print_json(diff_view(draft))
    else:
        for problem in draft.problems:
            click.echo(str(replace(problem, file=str(file))))
        if draft.changes:
            print_rows(draft.changes, _change_row, False)
        elif draft.can_be_loaded:
            click.echo(f"{file}: nothing changes for customers of {path}")
    if not draft.can_be_loaded:
        raise SystemExit(1)


def _change_row(change: CatalogChange) -> dict[str, Any]:
    return {
        "model": change.model,
        "field": change.field,
        "effect": change.effect,
        "what changes": change.sentence,
    }


@catalog.command("show", epilog=example("tollgate catalog show pocket-chat --json"))
@click.argument("name", required=False)
@json_option
def catalog_show(name: str | None, as_json: bool) -> None:
    """Show models with their route and prices."""
    entries = load_catalog(read_settings().catalog).models
    by_name = {entry.name: entry for entry in entries}
    if name is not None:
        if name not in by_name:
            refuse(f"the catalog has no model {name!r}; {did_you_mean(name, sorted(by_name))}")
        entries = (by_name[name],)
    print_rows(entries, lambda entry: _entry_row(entry, by_name.get), as_json)


def _counted(warnings: int) -> str:
    return {0: "no mistakes", 1: "1 warning"}.get(warnings, f"{warnings} warnings")


def _entry_row(entry: CatalogEntry, find: Find) -> dict[str, Any]:
    lines = [
        price_line(line.unit, format_usd(line.amount), line.per, line.when) for line in entry.price
    ]
    typical = typical_nanos(entry, find)
    return {
        "name": entry.name,
        "task": entry.task,
        "route": entry.engine or ("workflow" if entry.workflow else "upstream"),
        "tier": entry.tier,
        "typical": None if typical is None else f"${format_usd(typical)}",
        "price": lines or ["the sum of its steps"],
    }


@catalog.command(
    "pick", epilog=example('tollgate catalog pick "product photos" --role student --budget 0.05')
)
@click.argument("words", nargs=-1)
@click.option("--task", help="A task's name, such as text-to-image, or words.")
@click.option("--role", help="Role of the person who uses the model, such as student.")
@click.option("--budget", type=Usd(), help="Maximum price of one typical result, in USD.")
@json_option
def catalog_pick(
    words: tuple[str, ...], task: str | None, role: str | None, budget: str | None, as_json: bool
) -> None:
    """Pick models for WORDS, a task, a role and a budget, each with its reason.

    Prices are those of the catalog file. `today` is the local model, whether or not a worker serves
    it now.
    """
    entries = load_catalog(read_settings().catalog).models
    wish = read_wish(
        entries,
        task=task,
        role=role,
        text=" ".join(words) or None,
        budget_nanos=None if budget is None else parse_usd(budget),
    )
    found = pick(
        entries,
        (),
        wish,
        find={entry.name: entry for entry in entries}.get,
        runs_here=lambda entry: entry.upstream is None,
    )
    if as_json:
        print_json(found)
        return
    picked = {
        "best": found["best"],
        "cheaper": found["cheaper"],
        "better": found["better"],
        "today": found["today"],
    }
    rows = [(name, view) for name, view in picked.items() if view is not None]
    print_rows(rows, _picked_row, False)
    if found["message"] is not None:
        click.echo(found["message"])
    if unknown := found["asked"]["unknown_words"]:
        click.echo(f"no model is described by: {', '.join(unknown)}", err=True)


def _picked_row(picked: tuple[str, PickedView]) -> dict[str, Any]:
    name, view = picked
    return {
        "pick": name,
        "model": view["name"],
        "tier": view["tier"],
        "a result": f"${view['typical_price']}",
        f"{RESULTS:,}": f"${view['what_if']['cost']}",
        "why": view["why"],
    }
