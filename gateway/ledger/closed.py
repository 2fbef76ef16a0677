"""A closed request, as read from its receipt and its stored output."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sqlalchemy import RowMapping

from gateway.ledger.expenses import NO_RECORD, RunRecord
from gateway.pricing import ServiceClass
from gateway.tables.core import QUANTITIES
from workers.contract.jobs import BlobRef, PromptWarning, RequestId, Timings, Usage

Status: TypeAlias = Literal["succeeded", "failed", "cancelled", "expired"]

UNITS: Final = ("requests", *QUANTITIES)
"""Quantities of a usage; each is a column of ``receipts``."""


NOT_QUEUED: Final = ("queue_full", "account_full")
"""Reasons of requests that had a hold but found the queue full; clients may send them again."""


class RequestError(msgspec.Struct, frozen=True):
    """Why a request produced no answer, as reported to the client."""

    code: str
    message: str
    param: str | None = None


class _Warned(msgspec.Struct):
    """The part of a job that is shown with its request."""

    warnings: tuple[PromptWarning, ...] = ()


def warnings_of(job: bytes) -> tuple[PromptWarning, ...]:
    """Read what the model will not understand from an encoded job; empty if it cannot be read."""
    if b"warnings" not in job:
        return ()
    try:
        return msgspec.msgpack.decode(job, type=_Warned).warnings
    except msgspec.DecodeError:
        return ()


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output of a request: a JSON value, and references to its blobs.

    A ``value`` that is too large for SQL is stored as a blob (``stored``) and loaded when it is
    displayed; see ``requests.outputs``.
    """

    value: dict[str, Any] = {}
    blobs: tuple[BlobRef, ...] = ()
    stored: BlobRef | None = None
    warnings: tuple[PromptWarning, ...] = ()
    """What the model did not understand of the prompt."""

    def row(self) -> bytes:
        """Encode for SQL, without a value that is stored as a blob."""
        kept = self if self.stored is None else msgspec.structs.replace(self, value={})
        return msgspec.msgpack.encode(kept)

    @property
    def is_loaded(self) -> bool:
        return self.stored is None or bool(self.value)


class ClosedRequest(msgspec.Struct, frozen=True):
    """A request that has ended. ``output`` is None after its retention."""

    request_id: RequestId
    account_id: int
    model: str
    task: str
    status: Status
    outcome: Literal["charged", "released"]
    reason: str
    cost_nanos: int
    hold_nanos: int
    price_id: int
    usage: Usage
    timings: Timings
    accepted_at: datetime
    settled_at: datetime
    error: RequestError | None = None
    output: Output | None = None
    metadata: Mapping[str, str] = {}
    service_class: ServiceClass = "standard"
    kept_until: datetime | None = None
    """End of the output's retention, if there is an output."""
    run: RunRecord = NO_RECORD
    expense_nanos: int | None = None
    """What the request cost the operator; None if that is not known."""

    @property
    def warnings(self) -> tuple[PromptWarning, ...]:
        return self.output.warnings if self.output is not None else ()

    @property
    def was_queued(self) -> bool:
        """Whether the request was ever queued."""
        return self.status != "cancelled" or self.reason not in NOT_QUEUED


def read_closed(row: RowMapping) -> ClosedRequest:
    """Build a closed request from a row of ``receipts``, with ``body`` from ``outputs`` or NULL."""
    return ClosedRequest(
        request_id=RequestId(row["request_id"]),
        account_id=row["account_id"],
        model=row["model"],
        task=row["task"],
        status=row["status"],
        outcome=row["outcome"],
        reason=row["reason"],
        cost_nanos=row["charge_nanos"],
        hold_nanos=row["hold_nanos"],
        price_id=row["price_id"],
        usage=Usage(**{unit: row[unit] for unit in UNITS}, attributes=row["attributes"] or {}),
        timings=msgspec.convert(row["timings"], Timings),
        accepted_at=row["accepted_at"],
        settled_at=row["settled_at"],
        error=msgspec.convert(row["error"], RequestError) if row["error"] else None,
        output=msgspec.msgpack.decode(row["body"], type=Output) if row["body"] else None,
        metadata=row["metadata"] or {},
        service_class=row["service_class"],
        kept_until=row.get("kept_until"),
        run=msgspec.convert(row["run"], RunRecord) if row["run"] else NO_RECORD,
        expense_nanos=row["expense_nanos"],
    )
