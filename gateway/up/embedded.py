"""Runs ``tollgate up``: queue server, gateway and one worker, as children of one supervisor.

The supervisor holds a lock on the home directory, starts its children, restarts those that exit,
and on SIGINT or SIGTERM stops them in this order: worker, gateway, queue server. If the supervisor
is killed, the kernel ends its children (Linux). All state is in the home directory.

It imports little, so that the children start soon: neither SQL nor HTTP. The gateway prepares the
database (``first_start``), and ``progress`` is imported when the children run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import click

from gateway.settings import Settings
from gateway.up import environment
from gateway.up import home as state
from gateway.up.children import CannotStart, Child
from gateway.up.home import KEYS_FILE
from gateway.up.queue_server import (
    NoQueueServer,
    arguments,
    find_server,
    socket_path,
    wait_until_up,
)
from workers.contract.models import ModelSpec, read_specs


async def up(settings: Settings, *, console_link: bool) -> None:
    """Run everything until SIGINT or SIGTERM. Raise ``CannotStart`` if that fails."""
    home = settings.home.resolve()
    state.secure(home)
    with _lock(home):
        _check_port(settings)
        state.remove_queue_files(home)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        children: list[Child] = []
        try:
            await _run(settings, home, children, stop, console_link=console_link)
        finally:
            for child in reversed(children):
                await child.stop()


async def _run(
    settings: Settings,
    home: Path,
    children: list[Child],
    stop: asyncio.Event,
    *,
    console_link: bool,
) -> None:
    started_s = time.monotonic()
    specs = _read_catalog(settings.catalog)
    credentials = environment.credentials(specs)
    environ = {
        **os.environ,
        "DATABASE_URL": settings.sql_url,
        "BLOB_URL": settings.blobs,
        "TOLLGATE_HOME": str(home),
        "TOLLGATE_CATALOG": str(settings.catalog.resolve()),
        "TOLLGATE_HOST": settings.host,
        "TOLLGATE_PORT": str(settings.port),
        "PYTHONUNBUFFERED": "1",
    }

    def child(name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        log = home / "logs" / f"{name.partition(' ')[0]}.log"
        made = Child(name, command, environ, report=print_line, log=log)
        children.append(made)
        return made

    print_line(f"starting queue server, gateway and worker; logs are in {home / 'logs'}")
    redis_url, queue, path = settings.redis_url, None, socket_path(home)
    if redis_url is None:
        command = arguments(find_server(), home=home, socket=path)
        queue = child("queue server", command, environment.of_queue_server(environ))
        await wait_until_up(path, await queue.start())
        redis_url = f"unix://{path}"
    environ["REDIS_URL"] = redis_url

    gateway = child(
        "gateway",
        (sys.executable, "-m", "gateway", "serve", "--prepare"),
        environment.of_gateway(environ, credentials=credentials),
    )
    worker = child(
        "worker",
        (sys.executable, "-m", "workers"),
        environment.of_worker(environ, credentials=credentials, more=settings.worker_variables),
    )
    # The worker starts first because it has the most to load, and stops first because it drains.
    await worker.start()
    await gateway.start()
    # Imported late: the children start while this process imports it.
    from gateway.up.progress import (
        Start,
        gateway_probe,
        keep_live,
        queue_probe,
        visit_console,
    )

    local = [spec.name for spec in specs if spec.engine is not None]
    start = Start(settings, redis_url, models=local, started_s=started_s, report=print_line)
    tasks = [asyncio.create_task(item.keep_running()) for item in children if item is not gateway]
    tasks += [asyncio.create_task(item.keep_log_small()) for item in children]
    try:
        ready = asyncio.create_task(start.wait_until_ready(gateway, children))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await ready
            tasks.append(asyncio.create_task(gateway.keep_running()))
            async with gateway_probe(settings) as probe:
                tasks.append(asyncio.create_task(keep_live(gateway, probe)))
                if queue is not None:
                    tasks.append(asyncio.create_task(keep_live(queue, queue_probe(path))))
                _print_welcome(settings, home, loading=start.loading)
                if settings.console:
                    secret = console_link and sys.stdout.isatty()
                    link = await asyncio.to_thread(_console_link, settings) if secret else None
                    plain = f"{settings.console_url}/console"
                    hint = "(`tollgate console link` prints a one-time address)"
                    print_line(f"console   {link or f'{plain}   {hint}'}")
                    if link is not None:
                        tasks.append(asyncio.create_task(visit_console(settings)))
                tasks.append(asyncio.create_task(start.report_rest()))
                await stopped
        print_line("stopping")
        ready.cancel()
    finally:
        for item in children:
            item.stopping = True
        for task in tasks:
            task.cancel()


def _read_catalog(path: Path) -> tuple[ModelSpec, ...]:
    """Read the models. The gateway checks the file when it starts."""
    try:
        return read_specs(path)
    except ValueError as error:
        # Imported late: only the complete check explains where the mistake is.
        from gateway.catalog.loader import load_catalog

        load_catalog(path)
        raise CannotStart(str(error)) from None


def _print_welcome(settings: Settings, home: Path, *, loading: Sequence[str]) -> None:
    """Print the URLs and a first call. The key itself is printed to a terminal only, because other
    output can end up in a journal."""
    url = f"http://{settings.host}:{settings.port}"
    path = home / KEYS_FILE
    key = f"$(sed -n s/^TOLLGATE_API_KEY=//p {shlex.quote(str(path))})"
    if sys.stdout.isatty():
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition("=")
                if name == "TOLLGATE_API_KEY":
                    key = value
        print_line(f"API key   {key}   (also in {path})")
    else:
        print_line(f"API key   in {path}")
    print_line(f"API docs  {url}/schema")
    print_line(f"ready {url}")
    print_line(
        f'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" '
        "-H 'Content-Type: application/json' -d "
        """'{"model": "pocket-chat", "messages": """
        """[{"role": "user", "content": "What is a hold?"}]}'"""
    )
    if loading:
        print_line(f"still loading: {', '.join(loading)}")


def _console_link(settings: Settings) -> str | None:
    """Return a one-time address of the console, or None if an operator is in it already."""
    # Imported late: it needs SQL, for which nothing else here waits.
    from gateway.up.first_start import console_link

    return console_link(settings)


@contextlib.contextmanager
def _lock(home: Path) -> Iterator[None]:
    """Lock the home directory for this process."""
    file: IO[str] = open(home / "up.lock", "a+")  # noqa: SIM115  # held until the end
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid = file.read().strip() or "another process"
            raise CannotStart(f"already running on {home} (process {pid})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
    finally:
        file.close()


def _check_port(settings: Settings) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise CannotStart(
                f"port {settings.port} on {settings.host} cannot be used: {error.strerror}; "
                "set TOLLGATE_PORT to a different port"
            ) from None


def print_line(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()


def run(settings: Settings, *, console_link: bool = True) -> None:
    """Run ``up`` to its end. Raise ``CannotStart``, ``CatalogError`` or ``OSError``."""
    try:
        asyncio.run(up(settings, console_link=console_link))
    except NoQueueServer as error:
        raise CannotStart(str(error)) from None
    except TimeoutError:
        raise CannotStart("the queue server does not answer; see logs/queue.log") from None
