"""Money: the balance with its lots, the ledger with the proof, credit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.budgets import BudgetState, budget_states, list_budgets
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.api.native.ledger import read_entry
from gateway.billing.entries import LedgerEntry, entries
from gateway.billing.reconciliation import (
    Reconciliation,
    last_reconciliation,
    run_reconciliation,
)
from gateway.checks.decoding import read_id
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof, require_proof_of
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import ROWS, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of, one_account
from gateway.console.views.evidence import open_requests_url
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.views.limits import budget_urls
from gateway.console.views.money import RULES
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError
from gateway.ledger.lots import Lot, open_lots
from gateway.ledger.transfers import owed
from gateway.operations import credit

KINDS: Final = (
    "charge",
    "refund",
    "correction",
    "topup",
    "grant",
    "expiry",
    "chargeback",
    "rebate",
)
PROOF: Final = digest_of("ledger")
CREDITS: Final = (("topup", "top-up: was paid for"), ("grant", "grant: a gift"))


FILE_COLUMNS: Final = (
    *("id", "kind", "amount_nanos", "balance_nanos", "requests", "request_id", "actor", "reason"),
    "booked_at",
)
LISTS: Final = (
    ListColumns(
        "ledger",
        {
            "kind": "Kind",
            "amount": "Amount, $",
            "after": "Balance after, $",
            "what": "For",
            "reason": "Reason",
            "by": "By",
        },
    ),
)


class MoneyPages(Controller):
    path = "/"

    @get("/balance", guards=[needs("accounts.read")])
    async def balance(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        named = Query(request).text("account")

        def read(connection: Connection) -> tuple[Account, list[Lot], int, list[BudgetState]]:
            account = one_account(connection, visitor, named)
            budgets = list_budgets(connection, account.id, limit=ROWS)
            states = budget_states(connection, budgets, datetime.now(UTC))
            return account, open_lots(connection, account.id), owed(connection, account.id), states

        account, lots, debt, budgets = await request.services.database.read(read)
        return await page(
            request,
            visitor,
            "balance.html",
            title=f"{account.name} has {usd(account.available_nanos)} available",
            account=account,
            holding=open_requests_url(account.name),
            lots=lots,
            debt=debt,
            budgets=budgets,
            budget_urls=budget_urls(budgets, account.name),
            may_add=visitor.may("credit.write"),
        )

    @get("/credit/new", guards=[needs("credit.write")])
    async def credit_form(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _credit_page(request, visitor)

    @post("/credit/new", guards=[needs("credit.write")])
    async def add_credit(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        try:
            sent = {
                "kind": form.text("kind"),
                "amount": form.amount("amount") or "",
                "reference": form.text("reference"),
                "reason": form.text("reason"),
            }
            body = read_body(credit.CreditBody, sent)
            await require_proof_of(request, body.amount)

            def add(connection: Connection) -> Account:
                account = one_account(connection, visitor, named)
                credit.add(connection, visitor.author(), f"id:{account.id}", body)
                return account

            account = await request.services.database.write(add)
        except TollgateError as error:
            return await _credit_page(request, visitor, form.values(), error)
        return see_other(f"/console/ledger?account=id:{account.id}")

    @get("/credit/chargeback", guards=[needs("credit.write")])
    async def chargeback_form(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Show the form or, once it is filled in, what it would do."""
        return await _chargeback_page(request, visitor)

    @post("/credit/chargeback", guards=[needs("credit.write")])
    async def charge_back(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, named = await read_form(request), Query(request).text("account")
        try:
            body = _chargeback(form.values())
            await require_proof(request)

            def book(connection: Connection) -> Account:
                account = one_account(connection, visitor, named)
                credit.charge_back(connection, visitor.author(), f"id:{account.id}", body)
                return account

            account = await request.services.database.write(book)
        except TollgateError as error:
            return await _chargeback_page(request, visitor, form.values(), error)
        return see_other(f"/console/ledger?account=id:{account.id}&kind=chargeback")

    @get("/ledger", guards=[needs("ledger.read")])
    async def ledger(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        kind = query.one_of("kind", KINDS)
        cursor = query.text("cursor")
        below = None if cursor is None else read_id(cursor)
        if cursor is not None and below is None:
            raise InvalidRequest(
                "invalid_value", f"cursor is {cursor!r}, which no page has.", param="cursor"
            )

        def read(
            connection: Connection,
        ) -> tuple[Account | None, list[LedgerEntry], Reconciliation | None, ConsoleJob | None]:
            account = account_of(connection, visitor, query.text("account"))
            found = (
                []
                if account is None
                else entries(connection, account.id, limit=query.rows + 1, below=below, kind=kind)
            )
            job = find_latest(connection, "prove", PROOF)
            return account, found, last_reconciliation(connection), job

        account, found, proof, job = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        more = str(found[query.rows - 1].id) if len(found) > query.rows else None
        return await page(
            request,
            visitor,
            "ledger.html",
            lists=LISTS,
            title=_ledger_title(account, proof),
            account=account,
            as_file=TableFile("ledger", FILE_COLUMNS, found[: query.rows], is_cut=more is not None),
            rows=found[:ROWS],
            kinds=KINDS,
            proof=proof,
            job=job if visitor.may("ledger.write") else None,
            rules=RULES,
            filters=query.values,
            may_prove=visitor.may("ledger.write"),
            sees_findings=visitor.role is not None,
            pager=query.pages(more),
        )

    @get("/ledger/{entry_id:int}", guards=[needs("ledger.read")])
    async def entry(
        self, request: ApiRequest, visitor: CurrentVisitor, entry_id: FromPath[int]
    ) -> Response[str]:
        named = Query(request).text("account")

        account, entry, charged = await read_entry(
            request.services,
            lambda connection: one_account(connection, visitor, named),
            entry_id,
            account_id=visitor.account_id,
        )
        return await page(
            request,
            visitor,
            "entry.html",
            title=f"{entry.kind.capitalize()} of {usd(abs(entry.amount_nanos))}: {account.name}",
            account=account,
            entry=entry,
            charged=charged,
            is_exact=sum(each.cost_nanos for each in charged) == -entry.amount_nanos,
        )

    @post("/ledger/prove", guards=[needs("ledger.write")])
    async def prove(self, request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
        services = request.services
        job = NewJob(
            kind="prove",
            digest=PROOF,
            starter=visitor.author().name,
            act="ledger.write",
            back="/console/ledger",
        )

        async def work(_: Progress) -> None:
            await run_reconciliation(
                services.database, services.payment_provider, author=visitor.author()
            )

        await start_job(request, job, work)
        return see_other("/console/ledger")


async def _credit_page(
    request: ApiRequest,
    visitor: Visitor,
    values: dict[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    named = Query(request).text("account")
    account = await request.services.database.read(
        lambda connection: one_account(connection, visitor, named)
    )
    return await page(
        request,
        visitor,
        "credit.html",
        title=f"Add credit to {account.name}",
        status=error.http_status if error else 200,
        account=account,
        values=values or {"reference": credit.new_reference(), "kind": "topup"},
        kinds=CREDITS,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _chargeback(values: Mapping[str, str]) -> credit.ChargebackBody:
    """Read the form of a chargeback. Raise ``InvalidRequest``."""
    sent = {name: values.get(name, "").strip() for name in ("amount", "reference", "reason")}
    return read_body(credit.ChargebackBody, {**sent, "amount": sent["amount"].removeprefix("$")})


async def _chargeback_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query = Query(request)
    account, debt = await request.services.database.read(
        lambda connection: (
            found := one_account(connection, visitor, query.text("account")),
            owed(connection, found.id),
        )
    )
    amount = None
    if values is None and query.text("do") == "review":
        try:
            amount = _chargeback(query.values).amount
        except TollgateError as refused:
            error = refused
    shown = values or query.values
    return await page(
        request,
        visitor,
        "money/chargeback.html",
        title=f"Take a payment of {account.name} back",
        status=error.http_status if error else 200,
        account=account,
        debt=debt,
        amount=amount,
        values={"reference": credit.new_reference(), **shown},
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _ledger_title(account: Account | None, proof: Reconciliation | None) -> str:
    if proof is not None and proof.findings:
        count = len(proof.findings)
        return f"The books do not agree: {count} finding{'' if count == 1 else 's'}"
    if account is None:
        return "The books agree" if proof else "The books have not been proved yet"
    return f"Ledger of {account.name}"


HANDLERS: Final[list[Any]] = [MoneyPages]
