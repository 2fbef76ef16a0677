"""Requests whose client was answered 503 although their hold may be committed.

A database that goes away in the middle of a commit leaves open whether it happened. The client has
its 503 and is gone, so what was accepted after all is taken back: cancelled, for nothing, once the
database answers. Until then the queue refuses it, so that no sweeper runs it. An order with an
``Idempotency-Key`` is left alone, because its client finds it again by that name. If this process
dies first, the sweeper runs the request like any other once the queue has forgotten it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from gateway.sql.outages import OUTAGE, outage_name
from gateway.supervision import Beat, no_beat
from workers.contract.jobs import RequestId

log = logging.getLogger(__name__)

AGAIN_S: Final = (5.0, 30.0)
"""Pauses after which a request is looked for again: a commit can be carried out late, by a server
that was stopped or by a network that was cut."""
PAUSE_S: Final = 1.0
AT_ONCE: Final = 128
DOUBTS_MAX: Final = 10_000


@dataclass(slots=True)
class _Doubt:
    model: str
    due: float
    looked: int = 0


class Doubts:
    """``cancel`` stops a request that may not exist, for nothing."""

    def __init__(self, cancel: Callable[[str, RequestId], Awaitable[None]]) -> None:
        self._cancel = cancel
        self._doubts: dict[RequestId, _Doubt] = {}

    def __len__(self) -> int:
        return len(self._doubts)

    def note(self, model: str, request_id: RequestId) -> None:
        """Take a request back as soon as the database answers."""
        if len(self._doubts) >= DOUBTS_MAX:
            log.error("%s is in doubt and left to the sweeper: too many are", request_id)
            return
        self._doubts[request_id] = _Doubt(model, time.monotonic())

    async def run(self, beat: Beat = no_beat) -> None:
        """Take back what is in doubt, until cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            now = time.monotonic()
            due = [id for id, doubt in self._doubts.items() if doubt.due <= now][:AT_ONCE]
            await asyncio.gather(*(self._take_back(id) for id in due))
            beat()

    async def _take_back(self, request_id: RequestId) -> None:
        doubt = self._doubts[request_id]
        try:
            await self._cancel(doubt.model, request_id)
        except OUTAGE as error:
            log.debug("%s is still in doubt: %s", request_id, outage_name(error))
            doubt.due = time.monotonic() + PAUSE_S
            return
        except Exception:  # a boundary: the others are taken back
            log.exception("%s is in doubt and left to the sweeper", request_id)
        if doubt.looked == len(AGAIN_S):
            del self._doubts[request_id]
            return
        doubt.due = time.monotonic() + AGAIN_S[doubt.looked]
        doubt.looked += 1
