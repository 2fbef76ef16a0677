"""A request before admission and while it is open, independent of the dialect."""

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
from workers.contract.jobs import PromptWarning, RequestId


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The client's idempotency key, and the digest of the body that it was sent with."""

    key: str
    body_sha256: bytes

    @classmethod
    def of(cls, key: str, path: str, body: Any) -> Idempotency:
        """Bind a key to a path and a body. The order of the body's members does not matter."""
        canonical = msgspec.json.encode([path, body], order="sorted")
        return cls(key, hashlib.sha256(canonical).digest())


@dataclass(frozen=True, slots=True)
class Submission:
    """A client's request before admission: its input has the right shape, but is not checked
    against the entry's limits yet."""

    model: str
    input: Input | WorkflowSubmission
    task: Task | None = None
    """The task of the dialect's endpoint, or named by the client; None: chosen by the input."""
    within: str = ""
    """Path of the input in the client's body, so that errors can name its fields."""
    stream: bool = False
    waits: bool = True
    """Whether the client waits for the answer; if so, a model without a worker is refused."""
    metadata: Mapping[str, str] | None = None
    webhook: str | None = None
    idempotency: Idempotency | None = None
    fingerprint: str | None = None
    """Digest of key, path and body by which a retry after a disconnect finds the original. None for
    requests with an idempotency key and for streams, which are not retried."""
    retried: bool = False
    """Whether the client marked the request as a retry."""
    service_class: ServiceClass = "standard"
    deadline_at: datetime | None = None
    """The request's own deadline; None: the default."""
    alias: str | None = None
    """Name by which the client addressed the model, if it is not the model's own."""
    origin: str | None = None
    """Id of the request that this one is derived from."""
    group: str | None = None
    """Requests of one group, such as a batch, run on the same version of their model."""

    def sticky_key(self, account_id: int) -> str:
        """Return what a retry has in common with its original; empty if there is nothing."""
        if self.group is not None:
            return self.group
        return f"{account_id}:{self.idempotency.key}" if self.idempotency is not None else ""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that has a hold; ``position`` counts the jobs ahead of it while it is queued."""

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
    served_by: str | None = None
    """The model that runs it, if not the one that was ordered."""
    warnings: tuple[PromptWarning, ...] = ()

    @property
    def queue(self) -> str:
        """The model in whose queue it is."""
        return self.served_by or self.model
