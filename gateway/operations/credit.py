"""Credit, chargebacks, refunds and corrections of prices.

Amounts are bounded here, so that a typing error is refused. What payment providers report is booked
whatever its size.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal, TypedDict

from pydantic import Field
from sqlalchemy import Connection, select

from gateway.archive.bring_back import Rows, bring_back
from gateway.archive.marks import Archive, accepted_archives
from gateway.audit_log import Act, Author, record
from gateway.billing.charged import COLUMNS, NoteProgress, archived_charged
from gateway.billing.corrections import ArchivedCorrections, Correction, overpaid, plan, post
from gateway.checks.entered import BALANCE_MAX_NANOS, REFERENCE_MAX, check_amount, check_text
from gateway.checks.moments import timestamp
from gateway.errors import Unavailable
from gateway.ledger.discounts import Discounts, read_discounts
from gateway.ledger.refunds import charged_account
from gateway.ledger.refunds import refund as refund_charge
from gateway.ledger.transfers import Transfer, add_credit, chargeback, owed
from gateway.operations.accounts import find_owner, owner_id, subject
from gateway.operations.bodies import Body, Moment, Name, Reason, Reference, UsdAmount
from gateway.operations.refusals import refusals
from gateway.pricing import Price, format_usd
from gateway.sql.database import Database
from gateway.tables.core import receipts
from workers.contract.blobs import BlobError, Blobs

BROUGHT_BACK_MAX: Final = 1000
"""Maximum number of archived receipts of a month that a correction returns to the database."""


class CreditBody(Body):
    kind: Literal["topup", "grant"]
    amount: UsdAmount
    reference: Reference
    reason: Reason
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None
    expires_at: Moment | None = None


class ChargebackBody(Body):
    amount: UsdAmount
    reference: Reference
    reason: Reason


class RefundBody(Body):
    amount: UsdAmount | None = None
    reason: Reason
    reference: Reference | None = None


class CorrectionBody(Body):
    model: Name
    account: str | None = None
    starts_at: Annotated[Moment, Field(alias="from")]
    ends_at: Annotated[Moment, Field(alias="to")]
    price: list[dict[str, Any]]
    minimum: str | None = None
    reference: Reference
    reason: Reason
    dry_run: bool = True


class TransferView(TypedDict):
    """A booked movement; ``repeated`` if its reference had been booked before."""

    object: Literal["transfer"]
    id: int
    amount: str
    balance_after: str
    booked_at: str
    repeated: bool


class CorrectionView(TypedDict):
    request_id: str
    account_id: int
    paid: str
    due: str
    back: str


class CorrectionsView(TypedDict):
    """Charges that a price corrects; ``data`` has the first thousand."""

    object: Literal["correction"]
    dry_run: bool
    requests: int
    total: str
    booked: str
    data: list[CorrectionView]


@refusals()
def add(connection: Connection, author: Author, account: str, body: CreditBody) -> TransferView:
    """Book a top-up or a grant, once per reference."""
    owner = find_owner(connection, account)
    made = add_credit(
        connection,
        owner.id,
        check_amount(body.amount, "the amount"),
        kind=body.kind,
        key=_key(body.kind, body.reference),
        actor=author.name,
        reason=body.reason,
        priority=body.priority,
        expires_at=body.expires_at,
    )
    _check_balance("the balance", made.posted_after)
    entered = {"kind": body.kind, "reference": body.reference, "priority": body.priority}
    expires_at = timestamp(body.expires_at) if body.expires_at else None
    return _recorded(
        connection,
        author,
        "credit.add",
        subject(owner),
        made,
        account_id=owner.id,
        entered={**entered, "expires_at": expires_at},
        reason=body.reason,
    )


@refusals()
def charge_back(
    connection: Connection, author: Author, account: str, body: ChargebackBody
) -> TransferView:
    """Reverse a payment, once per reference. What is already spent becomes a debt."""
    owner = find_owner(connection, account)
    made = chargeback(
        connection,
        owner.id,
        check_amount(body.amount, "the amount"),
        key=_key("chargeback", body.reference),
        actor=author.name,
        reason=body.reason,
    )
    _check_balance("the debt", owed(connection, owner.id))
    return _recorded(
        connection,
        author,
        "credit.charge_back",
        subject(owner),
        made,
        account_id=owner.id,
        entered={"reference": body.reference},
        reason=body.reason,
    )


@refusals()
def refund(
    connection: Connection,
    author: Author,
    request_id: str,
    body: RefundBody,
    archived: Rows | None = None,
) -> TransferView:
    """Refund a charge. ``archived``: what ``find_removed`` found of an archived one."""
    if archived is not None:
        bring_back(connection, archived)
    made = refund_charge(
        connection,
        request_id,
        body.amount,
        key=f"refund:{request_id}:{body.reference or new_reference()}",
        actor=author.name,
        reason=body.reason,
    )
    return _recorded(
        connection,
        author,
        "credit.refund",
        f"request {request_id}",
        made,
        account_id=charged_account(connection, request_id),
        entered={"reference": body.reference},
        reason=body.reason,
    )


@refusals()
def correct(
    connection: Connection,
    author: Author,
    model: str,
    price: Price,
    *,
    starts_at: datetime,
    ends_at: datetime,
    account: str | None,
    reference: str,
    reason: str,
    dry_run: bool,
    archived: ArchivedCorrections | None = None,
    progress: NoteProgress | None = None,
) -> CorrectionsView:
    """Refund what requests accepted in a span paid beyond the right price, once per reference.

    ``archived``: what ``archived_corrections`` found.
    """
    account_id = owner_id(connection, account)
    found = plan(
        connection,
        model,
        price,
        starts_at=starts_at,
        ends_at=ends_at,
        account_id=account_id,
        archived=archived,
        progress=progress,
    )
    booked = 0
    if not dry_run:
        booked = post(connection, found, reference=reference, actor=author.name, reason=reason)
        record(
            connection,
            author,
            "credit.correct",
            f"model {model}",
            account_id=account_id,
            after={
                "from": timestamp(starts_at),
                "to": timestamp(ends_at),
                "reference": reference,
                "requests": len(found),
                "booked": format_usd(booked),
            },
            reason=reason,
        )
    return {
        "object": "correction",
        "dry_run": dry_run,
        "requests": len(found),
        "total": format_usd(sum(each.back_nanos for each in found)),
        "booked": format_usd(booked),
        "data": [
            {
                "request_id": each.request_id,
                "account_id": each.account_id,
                "paid": format_usd(each.paid_nanos),
                "due": format_usd(each.due_nanos),
                "back": format_usd(each.back_nanos),
            }
            for each in found
        ],
    }


async def archived_charge(database: Database, blobs: Blobs, request_id: str) -> Rows | None:
    """Read from the archive what ``refund`` brings back of a charge; None if it is not archived.

    Raise ``Unavailable`` if the archive cannot be read.
    """
    # Imported late: it takes a while, and a gateway should start quickly.
    from gateway.archive.files import ArchiveDamaged
    from gateway.archive.lookup import find_removed

    try:
        return await find_removed(database, blobs, request_id)
    except (BlobError, ArchiveDamaged) as error:
        raise Unavailable(
            "archive_unavailable",
            f"The receipt of {request_id} is archived, and the archive cannot be read: {error}.",
        ) from None


async def archived_corrections(
    database: Database,
    blobs: Blobs,
    model: str,
    price: Price,
    *,
    starts_at: datetime,
    ends_at: datetime,
    account: str | None,
    dry_run: bool,
) -> ArchivedCorrections | None:
    """Read from archives what ``correct`` corrects; None if no month of the span is archived.

    Unless nothing is to be booked, put its receipts back into the database, a page in each
    transaction. Raise ``Unavailable`` if an archive cannot be read.
    """

    def read(connection: Connection) -> tuple[list[Archive], Discounts, int | None]:
        archives = accepted_archives(connection, starts_at, ends_at)
        return archives, read_discounts(connection), owner_id(connection, account)

    with refusals():
        archives, discounts, account_id = await database.read(read)
        if not archives:
            return None
        # Imported late: it takes a while, and a gateway should start quickly.
        from gateway.archive.files import ArchiveDamaged, read_pages
        from gateway.archive.lookup import rows_of

        def overpaid_in(archive: Archive) -> list[Correction]:
            assert archive.manifest is not None
            columns = (*COLUMNS, "outcome")
            return [
                correction
                for page in read_pages(blobs, archive.manifest, "receipts", columns)
                for correction in overpaid(
                    archived_charged(
                        page, "accepted_at", starts_at, ends_at,
                        model=model, account_id=account_id,
                    ),
                    price,
                    discounts,
                )
            ]  # fmt: skip

        found: list[Correction] = []
        for archive in archives:
            of_month = await asyncio.to_thread(overpaid_in, archive)
            found += of_month
            if dry_run or not of_month:
                continue
            missing = await database.slow(partial(_missing, of_month))
            for start in range(0, len(missing), BROUGHT_BACK_MAX):
                page = missing[start : start + BROUGHT_BACK_MAX]
                try:
                    rows = await rows_of(blobs, archive, page)
                except (BlobError, ArchiveDamaged) as error:
                    raise Unavailable(
                        "archive_unavailable",
                        f"The archive of {archive.month} cannot be read: {error}.",
                    ) from None
                await database.slow_write(partial(bring_back, rows=rows))
        return ArchivedCorrections(archives, found)


def _missing(found: Sequence[Correction], connection: Connection) -> list[str]:
    """Return the requests without a receipt in the database."""
    missing: list[str] = []
    for start in range(0, len(found), BROUGHT_BACK_MAX):
        ids = [each.request_id for each in found[start : start + BROUGHT_BACK_MAX]]
        query = select(receipts.c.request_id).where(receipts.c.request_id.in_(ids))
        known = set(connection.execute(query).scalars())
        missing += [id for id in ids if id not in known]
    return missing


def new_reference() -> str:
    return secrets.token_hex(12)


def _recorded(
    connection: Connection,
    author: Author,
    act: Act,
    subject: str,
    made: Transfer,
    *,
    account_id: int,
    entered: Mapping[str, Any],
    reason: str,
) -> TransferView:
    """Record a transfer, unless its reference had been booked before. Return its view."""
    view = transfer_view(made)
    if not made.repeated:
        after = {**entered, "transfer": made.id, "amount": view["amount"]}
        record(connection, author, act, subject, account_id=account_id, after=after, reason=reason)
    return view


def _key(kind: str, reference: str) -> str:
    check_text(reference, "the reference", longest=REFERENCE_MAX, required=True)
    return f"{kind}:{reference}"


def _check_balance(what: str, nanos: int) -> None:
    """Raise ``ValueError`` if it is too large; that rolls back the caller's transaction."""
    if nanos > BALANCE_MAX_NANOS:
        raise ValueError(
            f"{what} would be ${format_usd(nanos)}; at most ${format_usd(BALANCE_MAX_NANOS)} "
            "are accepted"
        )


def transfer_view(made: Transfer) -> TransferView:
    return {
        "object": "transfer",
        "id": made.id,
        "amount": format_usd(made.amount_nanos),
        "balance_after": format_usd(made.posted_after),
        "booked_at": timestamp(made.booked_at),
        "repeated": made.repeated,
    }
