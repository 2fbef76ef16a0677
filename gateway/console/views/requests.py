"""Requests as lists and pages show them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias

from gateway.catalog.schema import CatalogEntry
from gateway.console.columns import ListColumns
from gateway.console.views.formats import count
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.receipts import Receipt
from gateway.pricing import Line
from gateway.requests.lists.origins import RequestOrigin
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import Timings, Usage

StateKind: TypeAlias = Literal["good", "bad", "warn", "open", "idle"]
KINDS: Final[Mapping[str, StateKind]] = {
    "succeeded": "good",
    "failed": "bad",
    "expired": "bad",
    "cancelled": "idle",
    "queued": "open",
    "running": "open",
}
PHASES: Final = ("queue", "load", "preprocess", "transfer", "forward", "postprocess")
STATUSES: Final = tuple(KINDS)
NO_ORIGIN: Final = RequestOrigin("", "", "")
COLUMNS: Final = ListColumns(
    "requests",
    {
        "status": "Status",
        "model": "Model",
        "task": "Task",
        "account": "Account",
        "key": "Key",
        "held": "Held, $",
        "charged": "Charged, $",
        "took": "Took, by phase",
        "first": "First",
        "made": "Made",
        "class": "Class",
        "tags": "Tags",
    },
    hidden=frozenset({"task", "tags"}),
)
"""Keys and classes are shown where there is room."""


class Phase(NamedTuple):
    name: str
    us: int


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request in a list; ``charged_nanos`` is None while it is open."""

    id: str
    account: str
    at: datetime
    status: str
    kind: StateKind
    reason: str
    model: str
    task: str
    hold_nanos: int
    charged_nanos: int | None
    phases: Sequence[Phase]
    total_us: int | None
    first_us: int | None
    made: str
    tags: Mapping[str, str]
    key: str
    key_name: str
    service_class: str

    @property
    def is_open(self) -> bool:
        return self.charged_nanos is None

    @property
    def is_free(self) -> bool:
        return self.charged_nanos == 0


@dataclass(frozen=True, slots=True)
class Money:
    """The money of a closed request: the hold is the charge and what was released."""

    hold_nanos: int
    charged_nanos: int
    refunded_nanos: int
    lines: Sequence[Line]

    @property
    def released_nanos(self) -> int:
        return self.hold_nanos - self.charged_nanos

    @property
    def net_nanos(self) -> int:
        return self.charged_nanos - self.refunded_nanos

    @property
    def is_itemised(self) -> bool:
        """Whether the lines add up to the charge; they exceed it if the hold was smaller."""
        return sum(line.amount_nanos for line in self.lines) == self.charged_nanos


def request_row(
    found: OpenRequest | ClosedRequest,
    accounts: Mapping[int, str],
    origins: Mapping[str, RequestOrigin] = {},
) -> RequestRow:
    account = accounts.get(found.account_id, str(found.account_id))
    key, key_name, service_class = origins.get(found.request_id, NO_ORIGIN)
    if isinstance(found, OpenRequest):
        return RequestRow(
            id=found.request_id,
            account=account,
            at=found.accepted_at,
            status=found.status,
            kind=KINDS[found.status],
            reason="",
            model=found.model,
            task=found.task,
            hold_nanos=found.hold_nanos,
            charged_nanos=None,
            phases=(),
            total_us=None,
            first_us=None,
            made="" if found.position is None else f"{found.position} ahead",
            tags=found.metadata,
            key=key,
            key_name=key_name,
            service_class=service_class,
        )
    return RequestRow(
        id=found.request_id,
        account=account,
        at=found.accepted_at,
        status=found.status,
        kind=KINDS[found.status],
        reason="" if found.status == "succeeded" else found.reason,
        model=found.model,
        task=found.task,
        hold_nanos=found.hold_nanos,
        charged_nanos=found.cost_nanos,
        phases=phases(found.timings),
        total_us=found.timings.total_us or None,
        first_us=found.timings.first_token_us or None,
        made=made(found.usage),
        tags=found.metadata,
        key=key,
        key_name=key_name,
        service_class=found.service_class,
    )


def phases(timings: Timings) -> Sequence[Phase]:
    """Return the phases of a request; the rest is waiting beside others, network and settling."""
    found = [Phase(name, getattr(timings, f"{name}_us")) for name in PHASES]
    rest = timings.total_us - sum(phase.us for phase in found)
    return [*found, Phase("rest", max(rest, 0))]


def made(usage: Usage) -> str:
    """Return what a request read and made, in a few words."""
    return ", ".join(_quantities(usage))


def money(receipt: Receipt) -> Money:
    closed = receipt.closed
    return Money(
        hold_nanos=closed.hold_nanos,
        charged_nanos=closed.cost_nanos,
        refunded_nanos=sum(refund.amount_nanos for refund in receipt.refunds),
        lines=receipt.lines,
    )


def _quantities(usage: Usage) -> Iterator[str]:
    if usage.output_tokens or usage.input_tokens or usage.cached_input_tokens:
        read = usage.input_tokens + usage.cached_input_tokens
        yield f"{count(read)} → {count(usage.output_tokens)} tokens"
    if usage.images:
        yield f"{count(usage.images)} image{'' if usage.images == 1 else 's'}"
    if usage.video_ms:
        yield f"{usage.video_ms / 1000:g} s video"
    if usage.audio_ms:
        yield f"{usage.audio_ms / 1000:g} s audio"
    elif usage.characters:
        yield f"{count(usage.characters)} characters"


def example_model(entries: Sequence[CatalogEntry]) -> str:
    """Return a model that answers the call of an example."""
    chats = (entry.name for entry in entries if entry.task == "text-generation")
    return next(chats, "your-model")
