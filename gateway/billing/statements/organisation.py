"""Statements of organisations: the statements of all accounts of a month, and their sums.

An account is on the statement of the organisation that it belonged to at the end of the month, or
belongs to while the month is open, with its whole month. Each account keeps its own invoice, so
every sum is that of the accounts' statements.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from gateway.accounts.organisations import Organisation, accounts_at
from gateway.billing.statements.statement import Statement, statement
from gateway.ledger.periods import span_of
from gateway.pricing import format_usd

COLUMNS: Final = (
    "month",
    "account_id",
    "account",
    "invoice",
    "kind",
    "model",
    "unit",
    "quantity",
    "description",
    "amount_usd",
    "amount_nanos",
)
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Starts of cells that spreadsheets compute."""


@dataclass(frozen=True, slots=True)
class OrganisationStatement:
    """One month of an organisation; a draft if a statement of its accounts is one."""

    organisation: Organisation
    month: str
    accounts: Sequence[Statement]

    @property
    def draft(self) -> bool:
        return not self.accounts or any(each.invoice is None for each in self.accounts)

    @property
    def opening_nanos(self) -> int:
        return sum(each.opening_nanos for each in self.accounts)

    @property
    def closing_nanos(self) -> int:
        return sum(each.closing_nanos for each in self.accounts)

    @property
    def sum_nanos(self) -> int:
        return sum(each.sum_nanos for each in self.accounts)

    @property
    def carried_in_nanos(self) -> int:
        return sum(each.carried_in_nanos for each in self.accounts)

    @property
    def carried_out_nanos(self) -> int:
        return sum(each.carried_out_nanos for each in self.accounts)

    @property
    def total_cents(self) -> int:
        return sum(each.total_cents for each in self.accounts)


def organisation_statement(
    connection: Connection, organisation: Organisation, month: str, *, now: datetime
) -> OrganisationStatement:
    """Read or draft the statements of an organisation's accounts. Raise ``ValueError`` if the text
    is not a month."""
    ends_at = span_of(month).ends_at
    ids = accounts_at(connection, organisation.id, ends_at if ends_at <= now else None)
    return OrganisationStatement(
        organisation, month, [statement(connection, id, month) for id in ids]
    )


def lines_csv(made: OrganisationStatement) -> bytes:
    """Encode the lines of all accounts as CSV. Cells that a spreadsheet would compute are quoted
    with an apostrophe; amounts are not."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in made.accounts:
        invoice = each.invoice.number if each.invoice else ""
        for line in each.lines:
            cells = (
                line.kind,
                line.model or "",
                line.unit or "",
                line.quantity or "",
                line.description,
            )
            writer.writerow(
                [
                    made.month,
                    each.account_id,
                    _cell(each.account),
                    invoice,
                    *(_cell(cell) for cell in cells),
                    format_usd(line.amount_nanos),
                    line.amount_nanos,
                ]
            )
    return text.getvalue().encode()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
