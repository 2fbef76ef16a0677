"""Runs the jobs of the console in this process, as tasks of one group.

A job is an asynchronous function that gets a ``Progress``. What computes calls it, in any thread;
the call raises ``JobCancelled`` once the visitor has cancelled the job, or the gateway ends. What
is known of a job is in its row, so every gateway shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection

from gateway.console.jobs import store
from gateway.console.jobs.store import JobState, NewJob
from gateway.errors import TollgateError, TooManyRequests
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE

JOBS_MAX: Final = 8
"""Maximum number of jobs of a gateway; those that read much wait for each other in their lane."""
NOTED_S: Final = 0.5
"""Interval at which the progress of a job is stored."""
ENDED_AGAIN_S: Final = (1, 2, 5, 10)
"""Pauses after which the end of a job is stored again."""
FAILED: Final = "An internal error occurred; it was logged."

log = logging.getLogger(__name__)


class JobCancelled(Exception):
    """The visitor has cancelled the job."""


class Progress:
    """How far a job is."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.is_cancelled = False

    def __call__(self, done: int, total: int | None = None) -> None:
        """Note what is done. Raise ``JobCancelled`` if the rest need not be done."""
        self.done = done
        self.total = self.total if total is None else total
        if self.is_cancelled:
            raise JobCancelled


Work: TypeAlias = Callable[[Progress], Awaitable[Any]]
"""What a job does; it returns the result, which is stored as JSON."""


class ConsoleJobs:
    """The jobs that this gateway runs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[str, Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Own the tasks of jobs. Those that run at the end are cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for progress in self._running.values():
                    progress.is_cancelled = True
                for task in self._tasks:
                    task.cancel()

    async def start(self, job: NewJob, work: Work) -> str:
        """Start a job and return its id; that of the same job if it runs already.

        Raise ``TooManyRequests`` if too many jobs run.
        """
        known = await self._database.read(
            lambda connection: store.find_latest(connection, job.kind, job.digest)
        )
        if known is not None and known.is_running:
            return known.id
        if self._group is None or len(self._running) >= JOBS_MAX:
            raise TooManyRequests(
                "too_many_jobs",
                f"{JOBS_MAX} jobs of the console run already; try again when one has ended.",
                retry_after_s=5,
            )
        id, progress = secrets.token_hex(16), Progress()
        self._running[id] = progress
        try:
            now = datetime.now(UTC)
            begun = await self._database.write(lambda each: store.begin(each, id, job, now))
        except BaseException:
            del self._running[id]
            raise
        if begun != id:
            # Another gateway has started it meanwhile.
            del self._running[id]
            return begun
        task = self._group.create_task(self._run(id, work, progress), name=f"job {job.kind}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return id

    async def _run(self, id: str, work: Work, progress: Progress) -> None:
        state: JobState = "done"
        result, problem = None, ""
        try:
            result = await self._watched(id, work, progress)
        except JobCancelled:
            state = "cancelled"
        except TollgateError as error:
            state, problem = "failed", error.message
        except Exception:
            log.exception("job %s failed", id)
            state, problem = "failed", FAILED
        finally:
            del self._running[id]
        await self._end(partial(store.end, id=id, state=state, result=result, problem=problem))

    async def _end(self, write: Callable[[Connection], None]) -> None:
        """Store how a job ended, also after an outage; otherwise it would look lost."""
        for pause_s in ENDED_AGAIN_S:
            try:
                await self._database.write(write)
                return
            except SQL_OUTAGE as error:
                log.warning("the end of a job is not stored yet: %s", type(error).__name__)
                await asyncio.sleep(pause_s)
        with contextlib.suppress(*SQL_OUTAGE):
            await self._database.write(write)

    async def _watched(self, id: str, work: Work, progress: Progress) -> Any:
        """Return the result of a job, storing its progress meanwhile."""
        doing = asyncio.ensure_future(work(progress))
        try:
            while not (await asyncio.wait([doing], timeout=NOTED_S))[0]:
                if await self._note(id, progress):
                    progress.is_cancelled = True
                    doing.cancel()
                    await asyncio.wait([doing])
                    raise JobCancelled
            return await doing
        finally:
            doing.cancel()

    async def _note(self, id: str, progress: Progress) -> bool:
        """Store the progress of a job. Return whether it is to be cancelled."""
        noted = partial(store.note, id=id, done=progress.done, total=progress.total)
        try:
            return await self._database.write(noted, durable=False)
        except SQL_OUTAGE as error:
            log.warning("the progress of a job is not stored: %s", type(error).__name__)
            return False
