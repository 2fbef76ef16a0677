"""Runs ``tollgate up``: queue server, gateway and one worker, as children of one supervisor.

The supervisor holds a lock on the home directory, starts its children, restarts those that exit,
and on SIGINT or SIGTERM stops them in this order: worker, gateway, queue server. If the supervisor
is killed, the kernel ends its children (Linux). All state is in the home directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, TypeAlias

import click
import httpx

from gateway.accounts.accounts import list_accounts
from gateway.accounts.pepper import read_pepper
from gateway.audit_log import Author
from gateway.catalog.loader import load_catalog
from gateway.operations import accounts, credit, keys
from gateway.operations.accounts import AccountBody
from gateway.operations.credit import CreditBody
from gateway.operations.database import record_migration
from gateway.operations.entrance.links import (
    LINK_MINUTES,
    LinkBody,
    create_link,
    operator_has_session,
)
from gateway.operations.keys import KeyBody
from gateway.settings import Settings
from gateway.sql.database import Database, migrate
from gateway.up import environment
from gateway.up import home as state
from gateway.up.children import Child
from gateway.up.queue_server import (
    NoQueueServer,
    arguments,
    find_server,
    ping,
    socket_path,
    wait_until_up,
)

STARTING_CREDIT: Final = "5"
KEYS_FILE: Final = "first-keys.env"
READY_S: Final = 120.0
LIVE_EVERY_S: Final = 2.0
LIVE_PATIENCE_S: Final = 5.0
"""Time limit of one probe of ``/health/live``."""
LIVE_FAILURES_MAX: Final = 5
"""Consecutive failed probes after which the gateway is restarted."""

Probe: TypeAlias = Callable[[], Awaitable[str | None]]
"""Returns why a child is not live, or None."""
SILENT: Final = "does not answer"


class CannotStart(Exception):
    """The reason why ``up`` cannot start, in one line."""


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
    credentials = environment.credentials(load_catalog(settings.catalog).models)
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

    redis_url, queue, path = settings.redis_url, None, socket_path(home)
    if redis_url is None:
        command = arguments(find_server(), home=home, socket=path)
        queue = child("queue server", command, environment.of_queue_server(environ))
        await wait_until_up(path, await queue.start())
        redis_url = f"unix://{path}"
    environ["REDIS_URL"] = redis_url

    gateway = child(
        "gateway",
        (sys.executable, "-m", "gateway", "serve"),
        environment.of_gateway(environ, credentials=credentials),
    )
    worker = child(
        "worker",
        (sys.executable, "-m", "workers"),
        environment.of_worker(environ, credentials=credentials, more=settings.worker_variables),
    )
    # The worker starts first because it has the most to load, and stops first because it drains.
    await worker.start()
    await asyncio.to_thread(_prepare, settings)
    await gateway.start()
    tasks = [asyncio.create_task(item.keep_running()) for item in children]
    tasks += [asyncio.create_task(item.keep_log_small()) for item in children]
    try:
        ready = asyncio.create_task(_wait_until_ready(settings, children))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await ready
            async with _gateway_probe(settings) as probe:
                tasks.append(asyncio.create_task(_keep_live(gateway, probe)))
                if queue is not None:
                    tasks.append(asyncio.create_task(_keep_live(queue, _queue_probe(path))))
                secret = console_link and sys.stdout.isatty()
                console = await asyncio.to_thread(_console_line, settings, secret=secret)
                _print_welcome(settings, home, console)
                await stopped
        print_line("stopping")
        ready.cancel()
    finally:
        for item in children:
            item.stopping = True
        for task in tasks:
            task.cancel()


def _prepare(settings: Settings) -> None:
    """Migrate the database; without any account, create the first one and its keys."""
    author = Author("tollgate up", "system")
    recorded = functools.partial(record_migration, author=author)
    migrate(settings.sql_url, prepare=settings.database_prepare, migrated=recorded)
    pepper = read_pepper(settings)
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        with database.transaction() as connection:
            if list_accounts(connection):
                return
            name = accounts.create(connection, author, AccountBody(name="default"))["name"]
            first = KeyBody(name="first key")
            scopes = ("inference", "read", "admin")
            operators = KeyBody(name="first admin key", scopes=scopes)
            secret = keys.create(connection, author, name, first, pepper=pepper)["secret"]
            admin = keys.create(connection, author, name, operators, pepper=pepper)["secret"]
            given = CreditBody.model_validate(
                {
                    "kind": "grant",
                    "amount": STARTING_CREDIT,
                    "reference": "starting credit",
                    "reason": "starting credit",
                }
            )
            credit.add(connection, author, name, given)
            # Written before the commit: stored keys whose secrets are lost would be worse than a
            # file with keys that do not exist.
            path = settings.home / KEYS_FILE
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"TOLLGATE_API_KEY={secret}\nTOLLGATE_ADMIN_KEY={admin}\n")
    finally:
        database.dispose()


async def _wait_until_ready(settings: Settings, children: list[Child]) -> None:
    """Wait until the gateway is ready and, if the catalog has local models, a worker serves one."""
    url = f"http://{settings.host}:{settings.port}/health/ready"
    local = any(entry.engine for entry in load_catalog(settings.catalog).models)
    deadline = time.monotonic() + READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(url)
                if answer.is_success and (answer.json()["models_served"] or not local):
                    return
            if time.monotonic() > deadline:
                raise CannotStart(f"not ready after {READY_S:.0f} s; see the logs in the home")
            for child in children:
                if child.keeps_failing:
                    raise CannotStart(f"{child.name} keeps failing; see {child.log}")
            await asyncio.sleep(0.05)


async def _keep_live(child: Child, probe: Probe) -> None:
    """End a child that is not live, so that it is restarted.

    The first process has already been live; a restarted one has ``READY_S`` to become live.
    """
    seen, failures = child.process, 0
    while True:
        await asyncio.sleep(LIVE_EVERY_S)
        process = child.process
        reason = await probe()
        if reason is None:
            seen, failures = process, 0
            continue
        failures += 1
        patient = seen is not process and time.monotonic() - child.started < READY_S
        if failures < LIVE_FAILURES_MAX or patient or process is None:
            continue
        if process.returncode is None:
            print_line(f"{child.name} {reason}; restarting it (see {child.log})")
            await child.end()
        failures = 0


@contextlib.asynccontextmanager
async def _gateway_probe(settings: Settings) -> AsyncIterator[Probe]:
    url = f"http://{settings.host}:{settings.port}/health/live"
    async with httpx.AsyncClient(trust_env=False, timeout=LIVE_PATIENCE_S) as client:

        async def probe() -> str | None:
            try:
                answer = await client.get(url)
            except httpx.HTTPError:
                return SILENT
            return None if answer.is_success else f"is not live: {answer.text}"

        yield probe


def _queue_probe(path: Path) -> Probe:
    async def probe() -> str | None:
        try:
            async with asyncio.timeout(LIVE_PATIENCE_S):
                return None if await ping(path) else SILENT
        except OSError:
            return SILENT

    return probe


def _print_welcome(settings: Settings, home: Path, console: str) -> None:
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
    if settings.console:
        print_line(f"console   {console}")
    print_line(f"API docs  {url}/schema")
    print_line(f"ready {url}")
    print_line(
        f'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" '
        "-H 'Content-Type: application/json' -d "
        """'{"model": "pocket-chat", "messages": """
        """[{"role": "user", "content": "What is a hold?"}]}'"""
    )


def _console_line(settings: Settings, *, secret: bool) -> str:
    """Return the address of the console: with ``secret`` a one-time link, unless an operator is in
    it already. Output that can end up in a journal has none."""
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        with database.transaction() as connection:
            if not secret or operator_has_session(connection, datetime.now(UTC)):
                plain = f"{settings.console_url}/console"
                return f"{plain}   (`tollgate console link` prints a one-time address)"
            author, pepper = Author("tollgate up", "system"), read_pepper(settings)
            made = create_link(connection, author, LinkBody(), pepper=pepper)
    finally:
        database.dispose()
    return (
        f"{settings.console_url}{made['path']}   (once, {LINK_MINUTES} minutes; or type "
        f"{made['code']} at /console/enter)"
    )


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
