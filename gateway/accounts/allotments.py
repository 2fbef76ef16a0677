"""Allotments: how much of an organisation's budget the budgets of its accounts take up.

A hard budget of an account without key is an allotment of the organisation's budgets of the same
window and model. Soft budgets and those of keys are not, because they limit no account.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import Connection, select

from gateway.pricing import format_usd
from gateway.sql.database import exact_sum
from gateway.tables.core import budgets
from gateway.tables.organisations import organisation_accounts, organisations


class Overallotted(Exception):
    """The budgets of an organisation's accounts would sum to more than that of the organisation."""


class Share(NamedTuple):
    """What budgets of accounts are allotted from: those of an organisation by window and model."""

    organisation_id: int
    window: str
    model: str | None


def allotments(connection: Connection, organisation_ids: Collection[int]) -> dict[Share, int]:
    """Sum what the accounts of organisations are allotted; shares without allotments are absent."""
    share = (organisation_accounts.c.organisation_id, budgets.c.window, budgets.c.model)
    rows = connection.execute(
        select(*share, exact_sum(budgets.c.limit_nanos))
        .join(organisation_accounts, organisation_accounts.c.account_id == budgets.c.account_id)
        .where(
            organisation_accounts.c.organisation_id.in_(sorted(organisation_ids)),
            organisation_accounts.c.left_at.is_(None),
            budgets.c.ended_at.is_(None),
            budgets.c.key_id.is_(None),
            budgets.c.hard,
        )
        .group_by(*share)
    )
    return {Share(*row[:3]): row[3] for row in rows}


def check_allotments(connection: Connection, organisation_ids: Collection[int]) -> None:
    """Raise ``Overallotted`` if a budget of these locked organisations is exceeded by those of its
    accounts, unless it allows that."""
    if not organisation_ids:
        return
    rows = connection.execute(
        select(budgets, organisations.c.name.label("organisation"))
        .join(organisations, organisations.c.id == budgets.c.organisation_id)
        .where(
            organisations.c.id.in_(sorted(organisation_ids)),
            budgets.c.ended_at.is_(None),
            ~budgets.c.overallot,
        )
        .order_by(budgets.c.id)
    ).all()
    allotted = allotments(connection, organisation_ids) if rows else {}
    for row in rows:
        nanos = allotted.get(Share(row.organisation_id, row.window, row.model), 0)
        if nanos > row.limit_nanos:
            span = "in all" if row.window == "total" else f"per {row.window}"
            raise Overallotted(
                f"the accounts of {row.organisation!r} would have budgets of "
                f"${format_usd(nanos)} {span}, more than the ${format_usd(row.limit_nanos)} of its "
                f"budget {row.id}; lower them, raise it, or let it be overallotted"
            )
