"""Accounting months: list, close, verify."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.archive.marks import Archive, list_archives
from gateway.audit_log import Author
from gateway.billing.statements.close import (
    BillingPeriod,
    changed_since_close,
    close_month,
    list_periods,
    rehearse_close,
)
from gateway.checks.moments import timestamp
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
