"""Viewers of live updates and their samplers, within one gateway process.

A subject is sampled by one task, however many watch it, and only while somebody does. A viewer has
one slot for each subject: what it gets is the newest state when its connection can take it, so that
a slow browser gets less and delays nothing. Knows neither HTTP nor sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from typing import Final

from gateway.console.live.topics import Feed, LiveSubject, Message, Reader
from gateway.errors import TollgateError, TooManyRequests, Unavailable
from gateway.sql.outages import OUTAGE, outage_name

log = logging.getLogger(__name__)

STREAMS_MAX: Final = 200
FULL_RETRY_S: Final = 60
"""Time after which a page that polls asks for a stream again."""


class LiveUpdates:
    def __init__(self, *, streams_max: int = STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self._sources: dict[Hashable, _Source] = {}
        self._viewers: set[Viewer] = set()
        self._closed = False

    @property
    def streams(self) -> int:
        return len(self._viewers)

    @property
    def sampled(self) -> int:
        """Number of subjects that are sampled now."""
        return len(self._sources)

    def check_room(self) -> None:
        """Raise ``TooManyRequests`` if the gateway has as many viewers as it takes."""
        if self._closed:
            raise Unavailable("gateway_stopping", "This gateway is stopping.", retry_after_s=1)
        if len(self._viewers) >= self._streams_max:
            raise TooManyRequests(
                "too_many_streams",
                f"{self._streams_max} browsers follow pages of this gateway, which is the most.",
                retry_after_s=FULL_RETRY_S,
            )

    def join(self, subjects: Mapping[str, LiveSubject]) -> Viewer:
        """Let a new viewer follow subjects, by the names that its page has for them."""
        viewer = Viewer()
        viewer.ended = self._closed
        for name, subject in subjects.items():
            source = self._sources.get(subject.key)
            if source is None:
                source = self._sources[subject.key] = _Source(subject.feed())
            source.viewers.add(viewer)
            viewer.add(name, subject.read(source.feed), source)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        for key, source in list(self._sources.items()):
            source.viewers.discard(viewer)
            if not source.viewers:
                source.stop()
                del self._sources[key]

    def close(self) -> None:
        """End all streams, and accept none: the gateway stops."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()


class Viewer:
    """One stream, with a slot for each subject that it follows."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Reader, _Source]] = {}
        self._woken = asyncio.Event()
        self._stale: dict[str, str | None] = {}
        self.ended = False

    def add(self, name: str, reader: Reader, source: _Source) -> None:
        self._slots[name] = (reader, source)
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self.ended = True
        self._woken.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is something to get, at most for a while."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def take(self) -> list[tuple[str, Message]]:
        """Return the newest state of each subject that the viewer has not got yet."""
        found: list[tuple[str, Message]] = []
        for name, (read, source) in self._slots.items():
            message = read()
            if source.stale_since != self._stale.get(name):
                self._stale[name] = source.stale_since
                message = {**(message or {}), "stale": source.stale_since}
            if message is not None:
                found.append((name, message))
        return found


class _Source:
    """A subject's feed, and the task that samples it."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.viewers: set[Viewer] = set()
        self.stale_since: str | None = None
        """Moment of the last sample, while none can be made."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        sampled_at = datetime.now(UTC)
        while True:
            began = time.monotonic()
            try:
                changed = await self.feed.sample()
                sampled_at = datetime.now(UTC)
                changed, self.stale_since = changed or self.stale_since is not None, None
            except Exception as error:  # a boundary: the figures stay, marked as old
                changed = self.stale_since is None
                if changed:
                    self._report(error)
                    self.stale_since = f"{sampled_at:%H:%M:%S} UTC"
            if changed:
                for viewer in self.viewers:
                    viewer.wake()
            # A sample that takes long is made less often, so that it never takes all of a thread.
            took = time.monotonic() - began
            await asyncio.sleep(max(self.feed.interval_s - took, 2 * took))

    def _report(self, error: Exception) -> None:
        if isinstance(error, (TollgateError, *OUTAGE)):
            log.warning("live updates pause: %s", outage_name(error))
        else:
            log.error("could not sample for live updates", exc_info=error)
