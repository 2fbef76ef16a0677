"""What a dialect hands over, and what it gets back: a request in the product's own words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec

from gateway.catalog.tasks import Task
from gateway.pricing import ServiceClass
from gateway.tasks.registry import Input
from gateway.tasks.workflow_submission import WorkflowSubmission
from workers.contract.jobs import RequestId


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The client's own name for its order, and a digest of the body that it sent with it."""

    key: str
    body_sha256: bytes

    @classmethod
    def of(cls, key: str, path: str, body: Any) -> Idempotency:
        """Bind a key to a body. The order of members in the body does not matter."""
        canonical = msgspec.json.encode([path, body], order="sorted")
        return cls(key, hashlib.sha256(canonical).digest())


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as a client placed it, its input checked in shape but not yet against limits."""

    model: str
    input: Input | WorkflowSubmission
    task: Task | None = None
    """Given by a dialect that serves one, or named; otherwise what the input is fit for."""
    within: str = ""
    """Where in the client's body the input stands, for errors to name its fields."""
    stream: bool = False
    waits: bool = True
    """Whether the client waits for the answer, so that a queue without a worker is no use to it."""
    metadata: Mapping[str, str] | None = None
    webhook: str | None = None
    idempotency: Idempotency | None = None
    fingerprint: str | None = None
    """Of an order without a name of its own whose answer is lost with its connection."""
    retried: bool = False
    """Whether the client says that it has placed this order before."""
    service_class: ServiceClass = "standard"
    deadline_at: datetime | None = None
    """Of an order that has one of its own."""
    alias: str | None = None
    """The name that the client ordered it by, where that is not the model's own."""
    origin: str | None = None
    """The request that this one is made from."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that is still held for; ``position`` counts the jobs ahead of a queued one."""

    request_id: RequestId
    account_id: int
    model: str
    task: str
    status: Literal["queued", "running"]
    hold_nanos: int
    accepted_at: datetime
    deadline_at: datetime
    position: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
