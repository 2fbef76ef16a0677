"""What a dialect gives so that its requests can be made in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.catalog.tasks import Task
from gateway.ledger.closed import Closed
from gateway.requests.order import Order


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path of the live API as a batch uses it."""

    path: str
    task: Task
    read: Callable[[Mapping[str, Any]], Order]
    """Check a body as the live endpoint does, and make it an order. Raises ``TollgateError``."""
    answer: Callable[[Closed], bytes]
    """The JSON body with which the live endpoint answers a request that succeeded."""
