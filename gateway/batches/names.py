"""The orders that the lines of a batch are, and the names under which they are placed. Pure.

A name is the batch, the line and the attempt, and no client can send it: a header has no line
breaks. There is a second attempt only after the first one's request was released unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.lines import CheckedLine
from gateway.batches.store import Batch
from gateway.tasks.submission import Idempotency, Submission
from workers.contract.jobs import RequestId


@dataclass(frozen=True, slots=True)
class EarlierAttempt:
    """The last attempt at a line, placed by this gateway or by one before it."""

    attempt: int
    request_id: RequestId
    accepted_at: datetime


def prefix_of(batch_id: str) -> str:
    """What the names of all lines of a batch begin with."""
    return f"batch\n{batch_id}\n"


def submission_of(
    batch: Batch, endpoint: BatchEndpoint, placed: CheckedLine, number: int, attempt: int
) -> Submission:
    """Make a line a submission of the class ``batch``, with its name and the batch's deadline."""
    name = f"{prefix_of(batch.id)}{number}\n{attempt}"
    return replace(
        placed.submission,
        stream=False,
        waits=False,
        metadata={
            **(placed.submission.metadata or {}),
            "batch_id": batch.id,
            "custom_id": placed.custom_id,
        },
        idempotency=Idempotency.of(name, endpoint.path, placed.body),
        service_class="batch",
        deadline_at=batch.expires_at,
    )


def last_attempts(
    batch_id: str, names: Mapping[str, tuple[RequestId, datetime]]
) -> dict[int, EarlierAttempt]:
    """Find each line's last attempt among the names that were placed."""
    found: dict[int, EarlierAttempt] = {}
    for name, (request_id, accepted_at) in names.items():
        number, attempt = map(int, name.removeprefix(prefix_of(batch_id)).split("\n"))
        if number not in found or found[number].attempt < attempt:
            found[number] = EarlierAttempt(attempt, request_id, accepted_at)
    return found
