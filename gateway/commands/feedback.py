"""``tollgate feedback``: what accounts say about their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from sqlalchemy import Connection

from gateway.accounts.accounts import find_account
from gateway.billing.usage.report import read_span
from gateway.commands.terminal import example, json_option, print_views, snapshot, write_pages
from gateway.feedback.store import RATINGS, FeedbackFilter
from gateway.feedback.views import export_page, read_dimensions, summarize


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and the options that ``_filter`` reads."""
    for add in (
        click.option("--tz", default="UTC", show_default=True, help="Time zone of the days."),
        click.option("--to", "last", help="Last day (included), or a moment (excluded)."),
        click.option("--from", "first", help="First day, or a moment with its offset."),
        click.option("--label", help="Only feedback with this label."),
        click.option(
            "--rating",
            type=click.IntRange(RATINGS[0], RATINGS[-1]),
            help="Only feedback with this rating.",
        ),
        click.option("--model", help="Only requests of this model."),
        click.argument("account_name", metavar="[ACCOUNT]", required=False),
    ):
        command = add(command)
    return command


@click.group("feedback")
def feedback_commands() -> None:
    """Feedback of accounts on their requests: ratings, labels and comments."""


@feedback_commands.command(
    "summary", epilog=example("tollgate feedback summary --model chat --from 2026-11-01")
)
@filtered
@click.option(
    "--group-by",
    default="model,served_by",
    show_default=True,
    help="Dimensions, separated by commas: account, model, served_by, task.",
)
@json_option
def feedback_summary(group_by: str, as_json: bool, **entered: Any) -> None:
    """Sum ratings and labels, by model and version."""
    by = read_dimensions(group_by)
    with snapshot() as connection:
        groups, total = summarize(connection, _filter(connection, **entered), by)
    total_labels = {name: "total" if name == by[0] else "" for name in by}
    print_views([*groups, {**total_labels, **total}], _row, as_json)


@feedback_commands.command("export", epilog=example("tollgate feedback export -o feedback.jsonl"))
@filtered
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.",
)
def feedback_export(output: Path, **entered: Any) -> None:
    """Write feedback as JSON lines, oldest request first, of an account or of all.

    Each line names the model and the version that ran the request. Inputs are not kept, and outputs
    belong to their account, so the file has neither.
    """
    with snapshot() as connection, open(output, "wb") as file:
        choice = _filter(connection, **entered)
        write_pages(file, export_page, connection, choice, of_all=True)
    click.echo(f"{output}: {output.stat().st_size} bytes")


def _row(group: Mapping[str, Any]) -> dict[str, Any]:
    labels = [f"{label} ({count})" for label, count in group["labels"].items()]
    return {
        **{name: value for name, value in group.items() if name not in ("by_rating", "labels")},
        **{f"{rating}": count for rating, count in group["by_rating"].items()},
        "labels": labels,
    }


def _filter(
    connection: Connection,
    *,
    account_name: str | None,
    model: str | None,
    rating: int | None,
    label: str | None,
    first: str | None,
    last: str | None,
    tz: str,
) -> FeedbackFilter:
    owners = None if account_name is None else (find_account(connection, account_name).id,)
    models = None if model is None else (model,)
    if first is None and last is None:
        return FeedbackFilter(owners, models, rating, label)
    span = read_span(first, last, tz, now=datetime.now(UTC))
    return FeedbackFilter(owners, models, rating, label, span.starts_at, span.ends_at)
