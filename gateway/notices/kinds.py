"""The kinds of notices, and the notice itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, get_args

OPERATOR: Final = 0
"""Number that stands for the operator where accounts have theirs."""

AccountKind: TypeAlias = Literal[
    "budget.passed",
    "key.expiring",
    "key.expired",
    "credit.expiring",
    "credit.low",
    "webhook.failing",
    "month.closed",
    "price.changed",
    "access.asked",
]
OperatorKind: TypeAlias = Literal[
    "budget.passed",
    "month.closed",
    "reconciliation.failed",
    "upstream.changed",
    "webhook.failing",
]
Kind: TypeAlias = AccountKind | OperatorKind
ACCOUNT_KINDS: Final[tuple[AccountKind, ...]] = get_args(AccountKind)
OPERATOR_KINDS: Final[tuple[OperatorKind, ...]] = get_args(OperatorKind)
KINDS: Final[tuple[Kind, ...]] = tuple(dict.fromkeys((*ACCOUNT_KINDS, *OPERATOR_KINDS)))
AnyKind: TypeAlias = Kind | Literal["test", "confirmation"]
TEST: Final = "test"
"""Kind of the notice by which a subscription is tested. It cannot be chosen."""

CONFIRMATION: Final = "confirmation"
"""Kind of the notice that asks the receiver of mail to agree. It cannot be chosen."""

TITLE_MAX: Final = 400


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an account or the operator is told, once."""

    key: str
    """Identifies what is told: a notice with the key of an earlier one is not sent."""
    account_id: int
    """The account, or ``OPERATOR``."""
    kind: str
    subject: str
    """The thing concerned, such as ``budget 12``."""
    title: str
    text: str
    data: Mapping[str, Any]
    lasting: bool = False
    """Whether what is told can last longer than the retention, so that its key must be kept."""


def kinds_of(account_id: int) -> tuple[Kind, ...]:
    """Return the kinds of notices that an account, or the operator, can get."""
    return OPERATOR_KINDS if account_id == OPERATOR else ACCOUNT_KINDS


def in_words(moment: datetime) -> str:
    """Format a moment for a text, to the minute."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
