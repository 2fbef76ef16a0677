"""Converts refusals of the ledger to errors for the client, with their amounts. Pure."""

from __future__ import annotations

from gateway.accounts.budgets import Budget
from gateway.errors import (
    Conflict,
    Forbidden,
    PaymentRequired,
    TollgateError,
    TooManyRequests,
    Unauthorized,
)
from gateway.ledger.bounds import BudgetExceeded
from gateway.ledger.concurrency import TooManyConcurrent
from gateway.ledger.holds import (
    AccountSuspended,
    CreditInUse,
    HoldAnswer,
    IdempotencyConflict,
    InsufficientCredit,
    KeyExpired,
    KeyRevoked,
    KeySpendLimit,
)
from gateway.pricing import format_usd


def refusal(answer: HoldAnswer, quote_nanos: int) -> TollgateError:
    """Return the error of a refused hold; its message names both amounts."""
    most = f"${format_usd(quote_nanos)}"
    match answer:
        case InsufficientCredit(available_nanos=available):
            return PaymentRequired(
                "insufficient_credit",
                f"This request can cost up to {most}, but the account has "
                f"${format_usd(available)}. Add credit, or ask for less (for text: a smaller "
                "max_tokens).",
            )
        case CreditInUse(available_nanos=available):
            return TooManyRequests(
                "credit_in_use",
                f"This request can cost up to {most}. The account could cover that, but requests "
                f"that are still running hold its credit down to ${format_usd(available)}.",
                retry_after_s=1,
            )
        case KeySpendLimit(remaining_nanos=remaining):
            return PaymentRequired(
                "key_spend_limit",
                f"This request can cost up to {most}, but this key may spend only "
                f"${format_usd(remaining)} more.",
            )
        case BudgetExceeded(budget=budget, remaining_nanos=remaining, in_use=True):
            return TooManyRequests(
                "budget_in_use",
                f"This request can cost up to {most}. That would fit {_named(budget)}, but "
                f"requests that are still running hold it down to ${format_usd(remaining)}.",
                retry_after_s=1,
                details=_owner(budget),
            )
        case BudgetExceeded(budget=budget, remaining_nanos=remaining, resets_at=resets_at):
            end = resets_at.strftime("%Y-%m-%dT%H:%M:%SZ") if resets_at else None
            return PaymentRequired(
                "budget_exceeded",
                f"This request can cost up to {most}, but {_named(budget)} has only "
                f"${format_usd(remaining)} left" + (f", until {end}." if end else "."),
                details={"budget_id": budget.id, "resets_at": end, **_owner(budget)},
            )
        case TooManyConcurrent(what=what, limit=limit):
            return TooManyRequests(
                "too_many_concurrent",
                f"This {what} already has {limit} requests queued or running, which is its limit; "
                "wait for one to end.",
                retry_after_s=1,
                details={"limit": limit, "unit": "concurrent"},
            )
        case IdempotencyConflict():
            return Conflict(
                "idempotency_conflict",
                "This Idempotency-Key was used before with another body.",
                param="Idempotency-Key",
            )
        case KeyRevoked():
            return Unauthorized("key_revoked", "This API key has been revoked.")
        case KeyExpired():
            return Unauthorized("key_expired", "This API key has expired.")
        case AccountSuspended():
            return Forbidden("account_suspended", "This account is suspended.")
    raise AssertionError(f"unexpected answer to a hold: {answer!r}")


def _owner(budget: Budget) -> dict[str, str]:
    return {} if budget.organisation is None else {"organisation": budget.organisation}


def _named(budget: Budget) -> str:
    name = f" {budget.name!r}" if budget.name else ""
    span = "in all" if budget.window == "total" else f"per {budget.window}"
    whose = f" of the organisation {budget.organisation!r}" if budget.organisation else ""
    return f"the budget{name} of ${format_usd(budget.limit_nanos)} {span}{whose}"
