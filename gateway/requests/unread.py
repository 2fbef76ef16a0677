"""Keeps results of upstreams that could not be read: they are paid for, and shown to the operator.

They are kept before the request is settled, which does not charge them. The content is the
upstream's, of an account, and is erased with its request.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from gateway import metrics
from gateway.aside import Aside
from gateway.ledger.settle import Settlement
from gateway.sql.outages import OUTAGE
from workers.contract.attempts import UnreadResult

log = logging.getLogger(__name__)


async def keep_unread(aside: Aside, settlement: Settlement, name: str, model: str) -> None:
    """Keep a result that could not be read, if there is one, under the id of its request or step.

    Raise only if the database is away.
    """
    unread = settlement.unread
    if unread is None:
        return
    reason = unread.reason.replace("\0", "")
    try:
        times = await aside.keep(name, f"{model}: {reason}", _content(unread))
    except OUTAGE:
        raise
    except Exception:  # a boundary: the request is settled nevertheless
        log.exception("could not keep the result of %s: number %s", name, unread.number)
        return
    if times == 1:
        metrics.UNREAD_RESULTS.labels(model).inc()
        log.error("kept a result of %s that could not be read: %s: %s", model, name, reason)


def _content(unread: UnreadResult) -> str:
    result: Any = unread.body
    with contextlib.suppress(msgspec.DecodeError):  # it can be cut at its maximum length
        result = msgspec.json.decode(unread.body)
    shown = {
        "number": unread.number,
        "model": unread.model,
        "endpoint": unread.endpoint,
        "result": result,
    }
    return msgspec.json.encode(shown).decode()
