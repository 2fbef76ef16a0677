"""Statements of organisations sum to the nano-dollar to those of their accounts."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta

from gateway.accounts.organisations import (
    Organisation,
    add_account,
    create_organisation,
    remove_account,
)
from gateway.audit_log import Author
from gateway.billing.statements.close import close_month
from gateway.billing.statements.organisation import lines_csv, organisation_statement
from gateway.billing.statements.pages import Issuer, html, lay_out_organisation, pdf
from gateway.billing.statements.statement import statement
from gateway.ledger.holds import hold
from gateway.ledger.settle import settle
from gateway.sql.database import Database
from tests.ledger.books import Books, done, open_books

MARCH = datetime(2026, 3, 5, 12, tzinfo=UTC)
APRIL = datetime(2026, 4, 2, 12, tzinfo=UTC)


def spend(books: Books, moment: datetime, *, tokens: int) -> None:
    order = books.order(accepted_at=moment, deadline_at=moment + timedelta(minutes=1))
    with books.database.transaction() as connection:
        hold(connection, [order])
        settle(
            connection,
            [done(order.request_id, output_tokens=tokens)],
            now=moment,
            prices={},
            retention=timedelta(hours=1),
        )


def test_statement_of_an_organisation_is_the_sum_of_those_of_its_accounts(
    database: Database,
) -> None:
    one, other, left, late = (open_books(database, credit=10**12) for _ in range(4))
    with database.transaction() as connection:
        group = create_organisation(connection, "=group <b>")
        for books, joined in ((one, MARCH), (other, MARCH), (left, MARCH), (late, APRIL)):
            add_account(connection, group.id, books.account.id, now=joined)
        remove_account(connection, group.id, left.account.id, now=MARCH + timedelta(days=9))
    for books, tokens in ((one, 7), (other, 3), (left, 5), (late, 9)):
        spend(books, MARCH, tokens=tokens)
    close_month(database, "2026-03", author=Author("test", "system"), clock=lambda: APRIL)

    with database.transaction() as connection:
        made = organisation_statement(connection, group, "2026-03", now=APRIL)
        own = [statement(connection, books.account.id, "2026-03") for books in (one, other)]
        current = organisation_statement(connection, group, "2026-04", now=APRIL)
        nobody = Organisation(group.id + 1, "empty", MARCH)
        empty = organisation_statement(connection, nobody, "2026-03", now=APRIL)

    assert list(made.accounts) == own
    assert not made.draft
    assert made.sum_nanos == sum(each.sum_nanos for each in own) == 2 * 100 + 10 * 80
    assert made.carried_out_nanos == made.sum_nanos - made.total_cents * 10**7
    assert made.opening_nanos - made.closing_nanos == sum(
        each.opening_nanos - each.closing_nanos for each in own
    )
    ids = [books.account.id for books in (one, other, late)]
    assert [each.account_id for each in current.accounts] == ids
    assert current.draft
    assert (empty.accounts, empty.sum_nanos, empty.draft) == ([], 0, True)
    rows = list(csv.DictReader(io.StringIO(lines_csv(made).decode())))
    assert sum(int(row["amount_nanos"]) for row in rows) == made.sum_nanos
    assert {row["invoice"] for row in rows} == {each.invoice.number for each in own if each.invoice}
    page = lay_out_organisation(made, Issuer("Issuer"))
    shown, printed = html(page), pdf(page, at=APRIL)
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown.replace("<b>Issuer</b>", "")
    assert all(each.account in shown for each in own)
    assert "$0.000001" in shown
    assert printed.startswith(b"%PDF-1.")
    assert printed == pdf(page, at=APRIL)
