"""The ``tollgate-worker`` command: serves the models of a catalog; drains on SIGTERM.

It follows its catalog file; SIGHUP makes it read the file at once.

Exit status: 0 after a drain, 1 after an unexpected error, 2 for invalid options or settings.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import uvloop
from pydantic import ValidationError

from workers.agent.agent import Agent
from workers.agent.catalog_file import Assignment, CatalogFile
from workers.contract.blobs import Blobs
from workers.contract.models import ModelSpec, read_specs
from workers.contract.redis import QueueClient, connect
from workers.engines import registry
from workers.logs import configure_logging
from workers.settings import WorkerSettings
from workers.upstreams import dialects

EXAMPLE = """
\b
Example:
  REDIS_URL=redis://localhost:6379 tollgate-worker --catalog catalog.yaml --device cuda:0
"""


@click.command(epilog=EXAMPLE, context_settings={"max_content_width": 100})
@click.option(
    "--catalog", type=click.Path(path_type=Path), help="Catalog file.  [default: catalog.yaml]"
)
@click.option("--redis-url", metavar="URL", help="URL of the queue server.  [default: REDIS_URL]")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Model to serve; repeatable.  [default: all that this worker can serve]",
)
@click.option(
    "--device", metavar="NAME", help="Device of the engines, such as cuda:0.  [default: cpu]"
)
@click.option("--threads", type=int, help="Number of CPU threads of the engine process.")
@click.option("--name", "worker_name", help="Name of this worker.  [default: host name]")
@click.option(
    "--preload/--no-preload", default=None, help="Load weights at startup.  [default: yes]"
)
@click.option(
    "--drain-s", type=float, help="Time for running jobs to end after SIGTERM.  [default: 30]"
)
@click.option("--log-level", help="DEBUG, INFO, WARNING or ERROR.  [default: INFO]")
def main(models: Sequence[str], **options: Any) -> None:
    """Run models for a Tollgate gateway: lease jobs from its queue and execute them.

    Every option can also be set in the environment, as TOLLGATE_ and its name.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = WorkerSettings(**given)
        catalog = CatalogFile(
            settings.catalog, lambda path: _assign(read_specs(path), models, settings)
        )
        assignment = catalog.read()
        _refuse_unknown(models, assignment)
        redis = connect(settings.queue_url)
        blobs = Blobs(settings.blob_url) if settings.blob_url else None
    except (OSError, ValueError) as error:
        _refuse(error)
    configure_logging(settings.log_level)
    os.environ["TOLLGATE_LOG_LEVEL"] = settings.log_level  # for the engine process
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(settings, redis, blobs, catalog, assignment))


def _assign(
    specs: Sequence[ModelSpec], names: Sequence[str], settings: WorkerSettings
) -> Assignment:
    """Split a catalog, or the models ``names`` of it, into models to serve and reasons why not."""
    serve, unavailable = [], {}
    for spec in specs:
        if names and spec.name not in names:
            continue
        if spec.upstream is None:
            obstacle = registry.obstacle(spec)
        else:
            obstacle = dialects.obstacle(spec, os.environ)
        if obstacle is not None:
            unavailable[spec.name] = obstacle
        elif spec.upstream is None:
            options = {"device": settings.device} | spec.options
            serve.append(msgspec.structs.replace(spec, options=options))
        else:
            serve.append(spec)
    return Assignment(serve, unavailable)


async def _work(
    settings: WorkerSettings,
    redis: QueueClient,
    blobs: Blobs | None,
    catalog: CatalogFile,
    assignment: Assignment,
) -> None:
    agent = Agent(
        redis,
        catalog,
        assignment,
        blobs=blobs,
        name=settings.worker_name,
        namespace=settings.namespace,
        environ=os.environ,
        device=settings.device,
        threads=settings.threads,
        preload=settings.preload,
        drain_s=settings.drain_s,
        account_share=settings.account_share,
        events_s=int(settings.event_retention_minutes * 60),
        ready=lambda worker: click.echo(f"worker ready {worker}"),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.end)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, catalog.hurry)
    # What was imported lives as long as the process, and a job creates few cycles.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        await agent.run()
    finally:
        await redis.aclose()


def _refuse_unknown(names: Sequence[str], first: Assignment) -> None:
    """Refuse names that the catalog does not have. A later catalog may lack some."""
    known = {spec.name for spec in first.specs} | first.unavailable.keys()
    if unknown := set(names) - known:
        raise ValueError(f"the catalog has no model called {', '.join(sorted(unknown))}")


def _refuse(error: Exception) -> NoReturn:
    """Print the error on one line and exit."""
    message = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    click.echo(f"tollgate-worker: {' '.join(message.split())}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
