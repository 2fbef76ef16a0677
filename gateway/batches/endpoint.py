"""What a dialect gives so that its requests can be made in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.catalog.tasks import Task
from gateway.ledger.closed import Closed
from gateway.requests.order import Order


def _never(_: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path of the live API as a batch uses it."""

    path: str
    task: Task
    read: Callable[[Mapping[str, Any]], Order]
    """Check a body as the live endpoint does, and make it an order. Raises ``TollgateError``."""
    answer: Callable[[Closed, Mapping[str, Any]], bytes]
    """The JSON body with which the live endpoint answers a request that succeeded; its body is
    what was asked."""
    forgets: Callable[[Mapping[str, Any]], bool] = _never
    """Whether what a body asks for is not to be fetched again outside the batch's files."""
