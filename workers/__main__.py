"""The ``tollgate-worker`` command: serves the models of a catalog; drains on SIGTERM.

Exit status: 0 after a drain, 1 after an unexpected error, 2 for invalid options or settings.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import uvloop
from pydantic import ValidationError

from workers.agent.agent import Agent
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
        specs = _choose(read_specs(settings.catalog), models)
        serve, unavailable = sort_specs(specs, settings, os.environ)
        redis = connect(settings.queue_url)
        blobs = Blobs(settings.blob_url) if settings.blob_url else None
    except (OSError, ValueError) as error:
        _refuse(error)
    configure_logging(settings.log_level)
    os.environ["TOLLGATE_LOG_LEVEL"] = settings.log_level  # for the engine process
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(settings, redis, blobs, serve, unavailable))


def sort_specs(
    specs: Sequence[ModelSpec], settings: WorkerSettings, environ: Mapping[str, str]
) -> tuple[list[ModelSpec], dict[str, str]]:
    """Split a catalog into the models to serve and, for each other model, why it is not served."""
    serve, unavailable = [], {}
    for spec in specs:
        obstacle = (
            registry.obstacle(spec) if spec.upstream is None else dialects.obstacle(spec, environ)
        )
        if obstacle is not None:
            unavailable[spec.name] = obstacle
        elif spec.upstream is None:
            options = {"device": settings.device} | spec.options
            serve.append(msgspec.structs.replace(spec, options=options))
        else:
            serve.append(spec)
    return serve, unavailable


async def _work(
    settings: WorkerSettings,
    redis: QueueClient,
    blobs: Blobs | None,
    specs: Sequence[ModelSpec],
    unavailable: Mapping[str, str],
) -> None:
    agent = Agent(
        redis,
        specs,
        blobs=blobs,
        name=settings.worker_name,
        namespace=settings.namespace,
        unavailable=unavailable,
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
    # What was imported lives as long as the process, and a job creates few cycles.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        await agent.run()
    finally:
        await redis.aclose()


def _choose(specs: Sequence[ModelSpec], names: Sequence[str]) -> Sequence[ModelSpec]:
    unknown = set(names) - {spec.name for spec in specs}
    if unknown:
        raise ValueError(f"the catalog has no model called {', '.join(sorted(unknown))}")
    return [spec for spec in specs if spec.name in names] if names else specs


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
