"""The submissions of a batch's lines, and their idempotency keys. Pure.

A key consists of batch, line and attempt. No client can send it, because it contains line breaks,
which a header cannot. A second attempt is made only if the first one's request was released before
it was executed.
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
    """The last attempt at a line, submitted by this gateway or an earlier one."""

    attempt: int
    request_id: RequestId
    accepted_at: datetime


def prefix_of(batch_id: str) -> str:
    """Return the common prefix of the idempotency keys of a batch."""
    return f"batch\n{batch_id}\n"


def submission_of(
    batch: Batch, endpoint: BatchEndpoint, line: CheckedLine, number: int, attempt: int
) -> Submission:
    """Build a line's submission: class ``batch``, with its idempotency key and the deadline."""
    name = f"{prefix_of(batch.id)}{number}\n{attempt}"
    return replace(
        line.submission,
        stream=False,
        waits=False,
        metadata={
            **(line.submission.metadata or {}),
            "batch_id": batch.id,
            "custom_id": line.custom_id,
        },
        idempotency=Idempotency.of(name, endpoint.path, line.body),
        service_class="batch",
        deadline_at=batch.expires_at,
        group=batch.id,
    )


def last_attempts(
    batch_id: str, names: Mapping[str, tuple[RequestId, datetime]]
) -> dict[int, EarlierAttempt]:
    """Return each line's last attempt among the submitted idempotency keys."""
    found: dict[int, EarlierAttempt] = {}
    for name, (request_id, accepted_at) in names.items():
        number, attempt = map(int, name.removeprefix(prefix_of(batch_id)).split("\n"))
        if number not in found or found[number].attempt < attempt:
            found[number] = EarlierAttempt(attempt, request_id, accepted_at)
    return found
