"""Requests in doubt: answered 503, although their hold may be committed.

If the database fails during a commit, its result is unknown. The client has received 503 and has
left, so a request that was accepted after all is closed without a charge once the database
answers, whatever the state of the queue. This gateway's sweeper does not run it meanwhile. A
request with an ``Idempotency-Key`` is left alone, because its client finds it again by that key. If
this process crashes first, or another gateway sweeps, the request is run like any other.
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
"""Pauses between attempts to cancel: a stopped server or a cut network can delay a commit."""
PAUSE_S: Final = 1.0
AT_ONCE: Final = 128
DOUBTS_MAX: Final = 10_000


@dataclass(slots=True)
class _Doubt:
    model: str
    due: float
    looked: int = 0


class Doubts:
    """``take_back`` closes a request, which may not exist, without a charge."""

    def __init__(self, take_back: Callable[[str, RequestId], Awaitable[None]]) -> None:
        self._close = take_back
        self._doubts: dict[RequestId, _Doubt] = {}

    def __len__(self) -> int:
        return len(self._doubts)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._doubts

    def note(self, model: str, request_id: RequestId) -> None:
        """Cancel a request as soon as the database answers."""
        if len(self._doubts) >= DOUBTS_MAX:
            log.error("too many requests in doubt; %s is left to the sweeper", request_id)
            return
        self._doubts[request_id] = _Doubt(model, time.monotonic())

    async def run(self, beat: Beat = no_beat) -> None:
        """Cancel the requests in doubt, until cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S)
            now = time.monotonic()
            due = [id for id, doubt in self._doubts.items() if doubt.due <= now][:AT_ONCE]
            await asyncio.gather(*(self._take_back(id) for id in due))
            beat()

    async def _take_back(self, request_id: RequestId) -> None:
        doubt = self._doubts[request_id]
        try:
            await self._close(doubt.model, request_id)
        except OUTAGE as error:
            log.debug("%s is still in doubt: %s", request_id, outage_name(error))
            doubt.due = time.monotonic() + PAUSE_S
            return
        except Exception:  # a boundary: the others are cancelled
            log.exception(
                "could not cancel %s, which is in doubt; it is left to the sweeper", request_id
            )
        if doubt.looked == len(AGAIN_S):
            del self._doubts[request_id]
            return
        doubt.due = time.monotonic() + AGAIN_S[doubt.looked]
        doubt.looked += 1
