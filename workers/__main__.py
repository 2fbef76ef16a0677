"""The ``tollgate-worker`` command: serves the models of a catalog; drains on SIGTERM.

It follows its catalog file; SIGHUP makes it read the file at once.

Exit status: 0 after a drain, 1 after an unexpected error, 2 for invalid options or settings.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click
import msgspec
import uvloop
from pydantic import ValidationError

from workers import devices
from workers.agent import per_device
from workers.agent.agent import Agent
from workers.agent.catalog_file import Assignment, CatalogFile
from workers.contract.blobs import Blobs
from workers.contract.models import ModelSpec, read_specs
from workers.contract.redis import QueueClient, connect
from workers.engines import registry
from workers.logs import configure_logging
from workers.settings import WorkerSettings
from workers.upstreams import dialects

log = logging.getLogger(__name__)

EXAMPLE = """
\b
Example:
  REDIS_URL=redis://localhost:6379 tollgate-worker --catalog catalog.yaml --device cuda:0,cuda:1
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
    "--device",
    metavar="NAMES",
    help="Devices of the engines: cpu, cuda, cuda:1, or a list such as cuda:0,cuda:1.  "
    "[default: every CUDA device, otherwise cpu]",
)
@click.option("--one-of", hidden=True, help="All devices of the worker that it is a part of.")
@click.option("--for-servers", hidden=True, help="Devices of the worker that servers have.")
@click.option(
    "--allow-commands/--no-allow-commands",
    default=None,
    help="Start the servers that entries name by upstream.command.  [default: no]",
)
@click.option("--threads", type=int, help="Number of CPU threads of the engine process.")
@click.option("--name", "worker_name", help="Name of this worker.  [default: host name]")
@click.option(
    "--memory-budget",
    metavar="SIZE",
    help="Maximum memory of the loaded models on each device, such as 20GB.  "
    "[default: the device's, less a reserve]",
)
@click.option(
    "--preload/--no-preload", default=None, help="Load weights at startup.  [default: yes]"
)
@click.option(
    "--drain-s", type=float, help="Time for running jobs to end after SIGTERM.  [default: 30]"
)
@click.option("--log-level", help="DEBUG, INFO, WARNING or ERROR.  [default: INFO]")
def main(
    models: Sequence[str], one_of: str | None, for_servers: str | None, **options: Any
) -> None:
    """Run models for a Tollgate gateway: lease jobs from its queue and execute them.

    Every option can also be set in the environment, as TOLLGATE_ and its name.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = WorkerSettings(**given)
        chosen, warning = devices.choose(settings.device)
        if one_of is None:
            share = _divide(chosen, read_specs(settings.catalog), models, settings)
        else:
            reserved = devices.parse(for_servers) if for_servers else ()
            share = DeviceShare(chosen[0], devices.parse(one_of), reserved, settings.allow_commands)
        catalog = CatalogFile(
            settings.catalog, lambda path: _assign(read_specs(path), models, share)
        )
        assignment = catalog.read()
        _refuse_unknown(models, settings.catalog)
        redis = connect(settings.queue_url)
        blobs = Blobs(settings.blob_url) if settings.blob_url else None
    except (OSError, ValueError) as error:
        _refuse(error)
    configure_logging(settings.log_level)
    if warning:
        log.warning(warning)
    os.environ["TOLLGATE_LOG_LEVEL"] = settings.log_level  # for the engine process
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if one_of is None and len(share.all_of) > 1:
            sys.exit(runner.run(_work_on_each(settings, share)))
        runner.run(_work(settings, redis, blobs, catalog, assignment, share))


class DeviceShare(NamedTuple):
    """The part of a worker that one process runs."""

    own: str
    all_of: tuple[str, ...]
    """Devices of the worker's engines."""
    for_servers: tuple[str, ...] = ()
    """Devices of the servers that it starts."""
    allows_commands: bool = False

    @property
    def is_first(self) -> bool:
        return self.own == self.all_of[0]


def _divide(
    chosen: tuple[str, ...],
    specs: Sequence[ModelSpec],
    names: Sequence[str],
    settings: WorkerSettings,
) -> DeviceShare:
    """Keep the last CUDA devices for servers that the catalog lets a worker start.

    If they need all, the engines have the CPU.
    """
    wanted = sum(
        spec.upstream.gpus
        for spec in specs
        if spec.upstream is not None and spec.upstream.command and (not names or spec.name in names)
    )
    cuda = [name for name in chosen if name != "cpu"]
    if not settings.allow_commands or not wanted or not cuda:
        return DeviceShare(chosen[0], chosen, (), settings.allow_commands)
    reserved = tuple(cuda[-wanted:])
    left = tuple(name for name in chosen if name not in reserved)
    if not left:
        left = ("cpu",)
        log.warning("servers have all GPUs of this worker, so its engines run on the CPU")
    return DeviceShare(left[0], left, reserved, allows_commands=True)


def _assign(specs: Sequence[ModelSpec], names: Sequence[str], share: DeviceShare) -> Assignment:
    """Split a catalog, or the models ``names`` of it, into models to serve and reasons why not.

    Models at upstreams are served by the process of the first device.
    """
    serve: list[ModelSpec] = []
    unavailable: dict[str, str] = {}
    for spec in specs:
        if names and spec.name not in names:
            continue
        if spec.upstream is not None:
            if not share.is_first:
                continue
            if (obstacle := _upstream_obstacle(spec, share)) is not None:
                unavailable[spec.name] = obstacle
            else:
                serve.append(spec)
            continue
        try:
            device = devices.device_of(spec.options.get("device"), share.own, share.all_of)
        except ValueError as error:
            unavailable[spec.name] = str(error)
            continue
        if device is not None and (obstacle := registry.obstacle(spec)) is not None:
            unavailable[spec.name] = obstacle
        elif device is not None:
            options = spec.options | {"device": device}
            serve.append(msgspec.structs.replace(spec, options=options))
    return Assignment(serve, unavailable)


def _upstream_obstacle(spec: ModelSpec, share: DeviceShare) -> str | None:
    if spec.upstream is not None and spec.upstream.command and not share.allows_commands:
        return "it has a command, and this worker starts none; set TOLLGATE_ALLOW_COMMANDS=true"
    return dialects.obstacle(spec, os.environ)


async def _work_on_each(settings: WorkerSettings, share: DeviceShare) -> int:
    reserved = ["--for-servers", ",".join(share.for_servers)] if share.for_servers else []
    commands = {
        device: per_device.command_of(
            device,
            arguments=[*sys.argv[1:], *reserved],
            name=settings.worker_name,
            all_of=share.all_of,
        )
        for device in share.all_of
    }
    return await per_device.run(commands)


async def _work(
    settings: WorkerSettings,
    redis: QueueClient,
    blobs: Blobs | None,
    catalog: CatalogFile,
    assignment: Assignment,
    share: DeviceShare,
) -> None:
    agent = Agent(
        redis,
        catalog,
        assignment,
        blobs=blobs,
        name=settings.worker_name,
        namespace=settings.namespace,
        environ=os.environ,
        device=share.own,
        server_devices=share.for_servers if share.is_first else (),
        threads=settings.threads,
        preload=settings.preload,
        budget_bytes=settings.budget_bytes,
        drain_s=settings.drain_s,
        account_share=settings.account_share,
        events_s=int(settings.event_retention_minutes * 60),
        ready=lambda worker: click.echo(f"worker ready {worker}"),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.end)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, catalog.hurry)
    if len(share.all_of) > 1:
        _end_with_parent(agent)
    # What was imported lives as long as the process, and a job creates few cycles.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        await agent.run()
    finally:
        await redis.aclose()


def _end_with_parent(agent: Agent) -> None:
    """Drain when standard input ends, because the parent has died."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            agent.end()

    loop.add_reader(sys.stdin.fileno(), end)


def _refuse_unknown(names: Sequence[str], catalog: Path) -> None:
    """Refuse names that the catalog does not have. A later catalog may lack some."""
    known = {spec.name for spec in read_specs(catalog)}
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
