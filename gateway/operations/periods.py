"""Accounting months: list, close, verify; the rebates given then, and the ledger's hourly sums."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.archive.marks import Archive, list_archives
from gateway.audit_log import Author, record
from gateway.billing.statements.close import (
    ALL_ACCOUNTS,
    BillingPeriod,
    changed_since_close,
    close_month,
    list_periods,
    rehearse_close,
    set_rebates,
    tiers_of,
)
from gateway.billing.usage.rollups import Seal, rebuild
from gateway.checks.moments import timestamp
from gateway.operations.accounts import owner_id
from gateway.operations.refusals import refusals
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.sql.database import Database


class PeriodView(TypedDict):
    object: Literal["period"]
    month: str
    state: str
    closed_at: str | None
    receipts: int | None
    charged: str | None
    transfers: int | None
    sha256: str | None


class RehearsedInvoiceView(TypedDict):
    account: str
    total: str
    rebate: str


class RehearsalView(TypedDict):
    """Dry run of closing a month: what would be written, or the obstacle."""

    object: Literal["period.rehearsal"]
    month: str
    obstacle: str | None
    receipts: int | None
    charged: str
    transfers: int | None
    invoices: list[RehearsedInvoiceView]


class VerifiedView(TypedDict):
    object: Literal["period"]
    month: str
    changed: bool


class ArchiveView(TypedDict):
    """An archived month. ``kept_receipts`` are still in the database: something refers to them."""

    object: Literal["archive"]
    month: str
    state: str
    receipts: int | None
    charged: str | None
    transfers: int | None
    bytes: int | None
    kept_receipts: int | None
    removed_receipts: int
    removed_transfers: int
    sha256: str
    changed_at: str


def list_all(connection: Connection) -> list[PeriodView]:
    return [_view(each) for each in list_periods(connection)]


@refusals(param="month")
def close(database: Database, author: Author, month: str) -> PeriodView:
    """Close a month in several transactions. Blocks for minutes."""
    return _view(close_month(database, month, author=author))


@refusals(param="month")
def rehearse(connection: Connection, month: str) -> RehearsalView:
    """Return what closing a month would write. Writes nothing."""
    rehearsal = rehearse_close(connection, month, now=datetime.now(UTC))
    found = rehearsal.period
    return {
        "object": "period.rehearsal",
        "month": found.month,
        "obstacle": rehearsal.obstacle,
        "receipts": found.receipts,
        "charged": format_usd(found.charge_nanos or 0),
        "transfers": found.transfers,
        "invoices": [
            {
                "account": each.account,
                "total": format_usd(each.total_cents * NANOS_PER_CENT),
                "rebate": format_usd(each.rebate_nanos),
            }
            for each in rehearsal.invoices
        ],
    }


@refusals(param="month")
def verify(connection: Connection, month: str) -> VerifiedView:
    changed = changed_since_close(connection, month)
    return {"object": "period", "month": month, "changed": changed}


def list_archived(connection: Connection) -> list[ArchiveView]:
    return [archive_view(each) for each in list_archives(connection)]


def archive_view(archive: Archive) -> ArchiveView:
    manifest = archive.manifest
    return {
        "object": "archive",
        "month": archive.month,
        "state": archive.state,
        "receipts": manifest.receipts if manifest else None,
        "charged": format_usd(manifest.charge_nanos) if manifest else None,
        "transfers": manifest.transfer_count if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "kept_receipts": manifest.receipts - archive.removed_receipts if manifest else None,
        "removed_receipts": archive.removed_receipts,
        "removed_transfers": archive.removed_transfers,
        "sha256": archive.sha256,
        "changed_at": timestamp(archive.changed_at),
    }


@refusals()
def set_tiers(
    connection: Connection, author: Author, account: str | None, tiers: Mapping[int, int]
) -> None:
    """Replace the tiers: threshold in nano-dollars → basis points."""
    account_id = owner_id(connection, account)
    before = tiers_of(connection, account_id or ALL_ACCOUNTS)
    set_rebates(connection, account_id or ALL_ACCOUNTS, dict(tiers))
    record(
        connection,
        author,
        "rebate.set",
        "all accounts" if account_id is None else f"account {account_id}",
        account_id=account_id,
        before=_tiers_view(before),
        after=_tiers_view(tiers),
    )


def rebuild_rollups(connection: Connection, author: Author) -> list[tuple[Seal, Seal]]:
    """Rebuild every sealed hour; return the old and new seals of those that differ."""
    differing = rebuild(connection)
    after = {"differing": [f"{old.hour:%Y-%m-%dT%H:%MZ}" for old, _ in differing]}
    record(connection, author, "ledger.rebuild", "ledger", after=after)
    return differing


def _view(period: BillingPeriod) -> PeriodView:
    return {
        "object": "period",
        "month": period.month,
        "state": period.state,
        "closed_at": timestamp(period.closed_at) if period.closed_at else None,
        "receipts": period.receipts,
        "charged": None if period.charge_nanos is None else format_usd(period.charge_nanos),
        "transfers": period.transfers,
        "sha256": period.sha256,
    }


def _tiers_view(tiers: Mapping[int, int]) -> dict[str, str]:
    return {format_usd(start): f"{points / 100:g} %" for start, points in sorted(tiers.items())}
