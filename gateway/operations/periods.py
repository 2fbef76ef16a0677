"""Accounting months: list, close, verify; the rebates given then, and the ledger's hourly sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.archive.marks import Archive, list_archives
from gateway.audit_log import Author, record
from gateway.billing.statements.close import (
    ALL_ACCOUNTS,
    BillingPeriod,
    all_tiers,
    changed_since_close,
    close_month,
    list_periods,
    rehearse_close,
    set_rebates,
    tiers_of,
)
from gateway.billing.usage.days import DAY, floor_day
from gateway.billing.usage.rollups import built_range, rebuild_day, rebuild_hours
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest
from gateway.operations.accounts import owner_id
from gateway.operations.bodies import Body, UsdAmount
from gateway.operations.refusals import refusals
from gateway.pricing import NANOS_PER_CENT, NANOS_PER_USD, format_usd, parse_usd
from gateway.sql.database import Database


class TierBody(Body):
    """The percentage credited of a month's spending beyond an amount."""

    starts_at: Annotated[UsdAmount, Field(alias="from")]
    percent: Annotated[str, Field(max_length=20, examples=["7.5"])]


class RebatesBody(Body):
    """The tiers of an account, or of all without their own; none ends the rebates."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "account": "acme",
                    "tiers": [
                        {"from": "1000", "percent": "5"},
                        {"from": "10000", "percent": "7.5"},
                    ],
                }
            ]
        },
    )

    account: str | None = None
    tiers: Annotated[list[TierBody], Field(max_length=100)]


TierView = TypedDict("TierView", {"from": str, "percent": str})


class RebatesView(TypedDict):
    """Rebate tiers; without an account, those of all accounts that have none of their own."""

    object: Literal["rebates"]
    account_id: int | None
    account: str | None
    tiers: list[TierView]


@dataclass(frozen=True, slots=True)
class RebuiltSum:
    """An hour or a day whose rows differed when they were built again."""

    name: str
    old_sha256: str
    new_sha256: str


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


def list_rebates(connection: Connection) -> list[RebatesView]:
    """Return the default tiers first, then those of accounts."""
    found = all_tiers(connection)
    names = account_names(connection, found)
    return [
        {
            "object": "rebates",
            "account_id": None if id == ALL_ACCOUNTS else id,
            "account": None if id == ALL_ACCOUNTS else names.get(id),
            "tiers": [
                {"from": format_usd(start), "percent": f"{points / 100:g}"}
                for start, points in tiers.items()
            ],
        }
        for id, tiers in found.items()
    ]


def put_rebates(connection: Connection, author: Author, body: RebatesBody) -> list[RebatesView]:
    """Replace the tiers of an account, or the default ones; return all."""
    set_tiers(connection, author, body.account, read_tiers(body.tiers))
    return list_rebates(connection)


def read_tiers(tiers: Sequence[TierBody]) -> dict[int, int]:
    """Return tiers as amount → basis points. Raise ``InvalidRequest``."""
    found = {tier.starts_at: read_percent(tier.percent) for tier in tiers}
    if len(found) < len(tiers):
        raise InvalidRequest("invalid_value", "Two tiers start at the same amount.", param="tiers")
    return found


def read_percent(text: str) -> int:
    """Return a percentage as basis points. Raise ``InvalidRequest``."""
    try:
        points, rest = divmod(parse_usd(text) * 100, NANOS_PER_USD)
    except ValueError:
        points, rest = -1, 0
    if rest or points < 0:
        raise InvalidRequest(
            "invalid_value",
            f"{text!r} is not a percentage; write it as 7.5, with at most two decimals.",
            param="tiers",
        )
    return points


def rebuild_rollups(database: Database, author: Author) -> list[RebuiltSum]:
    """Rebuild every sealed hour and day, each day in one transaction; return those that differ.

    What a transaction changes is recorded in it, and otherwise that nothing differs.
    """
    with database.snapshot() as connection:
        built = built_range(connection)
    differing: list[RebuiltSum] = []
    day, end = (None, None) if built is None else (floor_day(built[0]), built[1])
    while day is not None and end is not None and day < end:
        with database.transaction() as connection:
            changed = [
                RebuiltSum(f"hour {old.hour:%Y-%m-%dT%H:%MZ}", old.sha256, new.sha256)
                for old, new in rebuild_hours(connection, day)
            ]
            changed += [
                RebuiltSum(f"day {new.day:%Y-%m-%d}", old.sha256 if old else "missing", new.sha256)
                for old, new in rebuild_day(connection, day)
            ]
            if changed:
                _record_rebuilt(connection, author, changed)
        differing += changed
        day += DAY
    if not differing:
        with database.transaction() as connection:
            _record_rebuilt(connection, author, [])
    return differing


def _record_rebuilt(
    connection: Connection, author: Author, differing: Sequence[RebuiltSum]
) -> None:
    after = {"differing": [each.name.partition(" ")[2] for each in differing]}
    record(connection, author, "ledger.rebuild", "ledger", after=after)


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
