"""``tollgate worker``: list workers, drain and resume them, load and unload their models."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.commands.running.queue_client import ask
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    command_author,
    example,
    json_option,
    open_database,
    print_json,
    print_views,
    read_settings,
)
from gateway.operations.running import workers
from gateway.operations.running.workers import WishedAct, WorkerView

SAID: Final[dict[WishedAct, str]] = {
    "drain": "{worker} takes no more jobs; {running} still run",
    "resume": "{worker} takes jobs again",
    "load": "{worker} loads {model}",
    "unload": "{worker} unloads {model} when its running jobs have ended",
}

worker_argument = click.argument("name", metavar="WORKER")
model_argument = click.argument("model", metavar="MODEL")


@click.group()
def worker() -> None:
    """Workers: what runs where, and their maintenance. The start of a name suffices."""


@worker.command("list", epilog=example("tollgate worker list"))
@json_option
def worker_list(as_json: bool) -> None:
    """List live workers, and those that fell silent within the last hour.

    `busy` is the share of the last minute in which the engine process worked.
    """
    print_views(ask(read_settings(), workers.list_workers), _row, as_json)


@worker.command("show", epilog=example("tollgate worker show gpu-1"))
@worker_argument
@json_option
def worker_show(name: str, as_json: bool) -> None:
    """Show a worker: its models, its running jobs, and its upstreams' endpoints."""
    view = ask(read_settings(), lambda server: workers.show_worker(server, name))
    if as_json:
        print_json(view)
        return
    print_views([view], _row, False)
    for title, rows in (("models", view["models"]), ("endpoints", view["endpoints"])):
        if rows:
            click.echo(f"\n{title}")
            print_views(rows, _without_zeros, False)
    if view["jobs"]:
        click.echo("\njobs")
        print_views(view["jobs"], _job_row, False)


@worker.command("drain", epilog=example("tollgate worker drain gpu-1 --reason 'new driver'"))
@worker_argument
@audit_reason_option
@actor_option
def worker_drain(name: str) -> None:
    """Let a worker end its running jobs and take no others, until `resume`.

    Other workers take what waits. A worker that was restarted takes jobs.
    """
    _wish(name, "drain")


@worker.command("resume", epilog=example("tollgate worker resume gpu-1"))
@worker_argument
@audit_reason_option
@actor_option
def worker_resume(name: str) -> None:
    """Let a worker that drains take jobs again."""
    _wish(name, "resume")


@worker.command("load", epilog=example("tollgate worker load gpu-1 pocket-chat"))
@worker_argument
@model_argument
@audit_reason_option
@actor_option
def worker_load(name: str, model: str) -> None:
    """Load a model now, also one that was unloaded or could not be loaded."""
    _wish(name, "load", model)


@worker.command("unload", epilog=example("tollgate worker unload gpu-1 pocket-chat"))
@worker_argument
@model_argument
@audit_reason_option
@actor_option
def worker_unload(name: str, model: str) -> None:
    """Let the running jobs of a model end, free its memory, and serve it no longer until `load`."""
    _wish(name, "unload", model)


def _wish(name: str, act: WishedAct, model: str | None = None) -> None:
    settings = read_settings()
    author = command_author()
    with open_database(settings) as database:
        view = ask(
            settings,
            lambda server: workers.wish(server, database, author, name, act, model),
        )
    words = {"worker": view["name"], "running": view["running"], "model": model}
    click.echo(SAID[act].format(**words))


def _row(view: WorkerView) -> dict[str, Any]:
    loaded = sum(each["state"] in ("loaded", "upstream") for each in view["models"])
    return {
        "worker": view["name"],
        "state": view["state"],
        "device": view["device"],
        "version": view["version"],
        "running": f"{view['running']}/{view['capacity']}",
        "busy": _percent(view["busy"]),
        "steps/s": view["steps_per_second"],
        "memory": _memory(view),
        "models": f"{loaded}/{len(view['models'])}",
        "heard_at": view["heard_at"],
    }


def _job_row(view: Any) -> dict[str, Any]:
    names = ("request_id", "model", "account_id", "attempt", "age_s", "lease_left_s")
    return {name: view[name] for name in names}


def _without_zeros(view: Any) -> dict[str, Any]:
    return {
        name: _percent(value) if name == "busy" else None if value in (0, {}) else value
        for name, value in view.items()
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def _memory(view: WorkerView) -> str | None:
    used, total = view["memory_used_bytes"], view["memory_total_bytes"]
    return f"{used / 1e9:.1f}/{total / 1e9:.1f} GB" if total else None
