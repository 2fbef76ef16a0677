"""``tollgate queue``: what waits and runs, cancel a request, look for lost ones."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.catalog.loader import load_catalog
from gateway.commands.running.queue_client import ask
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    columns,
    example,
    json_option,
    perform,
    print_json,
    print_views,
    read_settings,
    transaction,
)
from gateway.operations.running import queues

LOAD: Final = columns("model queued running delayed accounts oldest_s wait_s pace service_s")
FLOW: Final = columns("account_id batch weight queued running queued_s share")
WAITING: Final = columns("position request_id account_id attempt age_s estimated_s deadline_at")
RUNNING: Final = columns("request_id account_id attempt age_s lease_left_s deadline_at")


@click.group()
def queue() -> None:
    """Queues of models: what waits and runs, and why it waits."""


@queue.command("list", epilog=example("tollgate queue list"))
@click.option("--idle", is_flag=True, help="Also list models without jobs.")
@json_option
def queue_list(idle: bool, as_json: bool) -> None:
    """List the queues of models, the longest wait first. Durations are in seconds."""
    settings = read_settings()
    models = [entry.name for entry in load_catalog(settings.catalog).models]
    found = ask(settings, lambda server: queues.list_queues(server, models, idle=idle))
    print_views(found, LOAD, as_json)


@queue.command("show", epilog=example("tollgate queue show pocket-chat"))
@click.argument("model")
@click.option(
    "--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Number of jobs."
)
@json_option
def queue_show(model: str, limit: int, as_json: bool) -> None:
    """Show the queue of a model: its accounts, its jobs in order, and those that run."""
    settings = read_settings()
    weights = queues.weights_of(settings)
    view = ask(
        settings, lambda server: queues.show_queue(server, model, weights=weights, limit=limit)
    )
    if as_json:
        print_json(view)
        return
    print_views([view], LOAD, False)
    parts: list[tuple[str, Any, Any]] = [
        ("accounts", view["flows"], FLOW),
        ("queued", view["jobs"], WAITING),
        ("running", view["running_jobs"], RUNNING),
        ("delayed", view["delayed_jobs"], RUNNING),
    ]
    for title, rows, row in parts:
        if rows:
            click.echo(f"\n{title}")
            print_views(rows, row, False)


@queue.command("cancel", epilog=example("tollgate queue cancel req_… --reason 'runs away'"))
@click.argument("request_id", metavar="REQUEST")
@audit_reason_option
@actor_option
def queue_cancel(request_id: str) -> None:
    """Cancel an open request of any account. What was not delivered is not charged."""
    settings = read_settings()
    found = perform(queues.record_cancellation, request_id)
    if not ask(settings, lambda server: queues.cancel_in_queue(server, found)):
        with transaction() as connection:
            queues.close_cancelled(connection, found.request_id)
    click.echo(f"{request_id} is cancelled")


@queue.command("requeue", epilog=example("tollgate queue requeue"))
@audit_reason_option
@actor_option
def queue_requeue() -> None:
    """Let a gateway check all open requests now, and enqueue those that the queue has lost."""
    settings = read_settings()
    perform(queues.record_check)
    interval_s = settings.sweep_interval_s
    view = ask(settings, lambda server: queues.requeue_lost(server, sweep_interval_s=interval_s))
    click.echo(f"a gateway checks all open requests within {view['within_s']:g} s")
