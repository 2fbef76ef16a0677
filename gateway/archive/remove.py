"""Removes the receipts and charges of a verified archive from the database, in bounded batches.

A charge goes with all of its receipts and their steps, and what carries it in the sums is written
in the same transaction. Receipts that something refers to stay: one that was refunded, with its
charge, and one whose output, stored media or webhook delivery is still kept. The next run removes
those that are free by then. All other transfers stay as well, because their keys make a repeated
booking have no effect, and there are few of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from gateway.archive.marks import Archive, find_archive
from gateway.ledger.periods import utc_now
from gateway.sql.database import upsert
from gateway.sql.partitions import is_partitioned
from gateway.tables.archives import (
    archived_charges,
    archived_spending,
    archived_windows,
    archives,
)
from gateway.tables.core import (
    SYSTEM_ACCOUNTS,
    accounts,
    outputs,
    receipts,
    refunds,
    transfers,
)
from gateway.tables.files import media
from gateway.tables.settlement_time import booked_in, settled_in, settled_within
from gateway.tables.webhooks import webhook_deliveries
from gateway.tables.workflows import receipt_steps

BATCH: Final = 200
"""Charges or uncharged receipts of a transaction; a charge has at most 128 receipts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next batch of an account begins: after a charge and a receipt."""

    account_id: int
    transfer_id: int = 0
    request_id: str = ""


def accounts_with_receipts(connection: Connection, archive: Archive) -> list[int]:
    """List the accounts that have receipts of the month in the database."""
    settled = select(receipts.c.request_id).where(
        receipts.c.account_id == accounts.c.id, *settled_within(connection, *archive.span)
    )
    return list(
        connection.execute(
            select(accounts.c.id).where(settled.exists()).order_by(accounts.c.id)
        ).scalars()
    )


def remove_batch(connection: Connection, month: str, place: Place, batch: int) -> Place | None:
    """Remove some of an account's receipts of a month whose archive is ``removing``.

    Return where the next batch begins, or None if there is none.
    """
    archive = find_archive(connection, month, lock=True)
    if archive is None or archive.state != "removing":
        raise LookupError(f"the archive of {month} is not removing")
    found = connection.execute(_charges(connection, archive, place, batch)).all()
    if found:
        # Refunds lock their receipt: whoever waits for the other sees what the other did.
        ids = [charge.id for charge in found]
        locked = select(receipts.c.request_id).where(receipts.c.transfer_id.in_(ids))
        connection.execute(locked.with_for_update()).all()
        charges = connection.execute(_charges(connection, archive, place, batch)).all()
        charges = [charge for charge in charges if charge.id in ids]
        if charges:
            _remove_charges(connection, archive, place.account_id, charges)
        return Place(place.account_id, found[-1].id, place.request_id)
    free = list(connection.execute(_uncharged(connection, archive, place, batch)).scalars())
    if not free:
        return None
    connection.execute(delete(receipt_steps).where(receipt_steps.c.request_id.in_(free)))
    connection.execute(delete(receipts).where(receipts.c.request_id.in_(free)))
    count_removed(connection, month, receipts=len(free))
    return Place(place.account_id, place.transfer_id, free[-1])


def count_removed(
    connection: Connection, month: str, *, receipts: int = 0, transfers: int = 0, nanos: int = 0
) -> None:
    """Add to what is in the files only; restoring subtracts."""
    connection.execute(
        update(archives)
        .where(archives.c.month == month)
        .values(
            removed_receipts=archives.c.removed_receipts + receipts,
            removed_transfers=archives.c.removed_transfers + transfers,
            removed_nanos=archives.c.removed_nanos + nanos,
            changed_at=utc_now(),
        )
    )


def add_spending(
    connection: Connection, month: str, rows: Iterable[Mapping[str, Any]], *, sign: int = 1
) -> None:
    """Carry the charges of receipts in the sums of their keys and budget windows.

    With the sign -1: no longer, because the receipts are in the database again.
    """
    keys: defaultdict[int, int] = defaultdict(int)
    windows: defaultdict[tuple[int, int], int] = defaultdict(int)
    for row in rows:
        if row["charge_nanos"]:
            keys[row["key_id"]] += sign * row["charge_nanos"]
            for budget_id, starts_us in row["windows"] or ():
                windows[budget_id, starts_us] += sign * row["charge_nanos"]
    for table, found in (
        (
            archived_spending,
            [{"key_id": key, "charge_nanos": nanos} for key, nanos in keys.items()],
        ),
        (
            archived_windows,
            [
                {"budget_id": budget, "starts_us": start, "charge_nanos": nanos}
                for (budget, start), nanos in windows.items()
            ],
        ),
    ):
        for values in found:
            places = [table.c.month == month]
            places += [
                table.c[name] == value for name, value in values.items() if name != "charge_nanos"
            ]
            sums = table.c.charge_nanos + values["charge_nanos"]
            if connection.execute(update(table).where(*places).values(charge_nanos=sums)).rowcount:
                continue
            connection.execute(insert(table).values(month=month, **values))


def _charges(connection: Connection, archive: Archive, place: Place, batch: int) -> Select[Any]:
    """Select the next charges of an account that can be removed. On SQLite the newest transfer of
    all stays, because new ones are numbered after the largest id that is left."""
    newest = transfers.alias()
    last = select(func.max(newest.c.id)).scalar_subquery()
    carried = (
        (archived_charges.c.account_id == place.account_id)
        & (archived_charges.c.first_version <= transfers.c.account_version)
        & (archived_charges.c.last_version >= transfers.c.account_version)
    )
    return (
        select(transfers)
        .where(
            transfers.c.from_account == place.account_id,
            transfers.c.to_account == SYSTEM_ACCOUNTS["revenue"],
            transfers.c.kind == "charge",
            transfers.c.id > place.transfer_id,
            *booked_in(connection, archive.span),
            ~exists().where(receipts.c.transfer_id == transfers.c.id, _is_in_use()),
            # It was removed before, and came back for a refund.
            ~exists().where(carried),
            *([] if is_partitioned(connection) else [transfers.c.id < last]),
        )
        .order_by(transfers.c.id)
        .limit(batch)
    )


def _uncharged(connection: Connection, archive: Archive, place: Place, batch: int) -> Select[Any]:
    return (
        select(receipts.c.request_id)
        .where(
            receipts.c.account_id == place.account_id,
            *settled_in(connection, archive.span),
            # Spelled so that the index of transfers, which has another order, is not used.
            (receipts.c.transfer_id + 0).is_(None),
            receipts.c.request_id > place.request_id,
            ~_is_in_use(),
        )
        .order_by(receipts.c.request_id)
        .limit(batch)
    )


def _is_in_use() -> ColumnElement[bool]:
    """SQL condition: something refers to a receipt."""
    return or_(
        *(
            exists().where(table.c.request_id == receipts.c.request_id)
            for table in (refunds, outputs, webhook_deliveries, media)
        )
    )


def _remove_charges(
    connection: Connection, archive: Archive, account_id: int, charges: Sequence[Row[Any]]
) -> None:
    ids = [charge.id for charge in charges]
    gone = connection.execute(
        select(
            receipts.c.transfer_id, receipts.c.key_id, receipts.c.charge_nanos, receipts.c.windows
        ).where(receipts.c.transfer_id.in_(ids))
    ).mappings()
    counts: defaultdict[int, int] = defaultdict(int)
    rows: list[Mapping[str, Any]] = [dict(row) for row in gone]
    for row in rows:
        counts[row["transfer_id"]] += 1
    add_spending(connection, archive.month, rows)
    _carry(connection, archive.month, account_id, charges, counts)
    of_charges = select(receipts.c.request_id).where(receipts.c.transfer_id.in_(ids))
    connection.execute(delete(receipt_steps).where(receipt_steps.c.request_id.in_(of_charges)))
    connection.execute(delete(receipts).where(receipts.c.transfer_id.in_(ids)))
    connection.execute(delete(transfers).where(transfers.c.id.in_(ids)))
    count_removed(
        connection,
        archive.month,
        receipts=len(rows),
        transfers=len(ids),
        nanos=sum(charge.amount_nanos for charge in charges),
    )


def _carry(
    connection: Connection,
    month: str,
    account_id: int,
    charges: Sequence[Row[Any]],
    counts: Mapping[int, int],
) -> None:
    """Replace consecutive charges by one entry each; others of the account stay between them."""
    last = connection.execute(
        select(archived_charges)
        .where(
            archived_charges.c.account_id == account_id,
            archived_charges.c.month == month,
            archived_charges.c.transfer_id < charges[0].id,
        )
        .order_by(archived_charges.c.transfer_id.desc())
        .limit(1)
    ).first()
    since = charges[0].id if last is None else last.transfer_id
    staying = {
        *_versions_between(connection, account_id, since, charges),
        *connection.execute(
            select(archived_charges.c.first_version).where(
                archived_charges.c.account_id == account_id,
                archived_charges.c.transfer_id > since,
                archived_charges.c.transfer_id < charges[-1].id,
            )
        ).scalars(),
    }
    runs: list[dict[str, Any]] = []
    if last is not None:
        runs.append(dict(last._mapping))
    for charge in charges:
        before = runs[-1]["last_version"] if runs else None
        if before is None or any(before < each < charge.account_version for each in staying):
            runs.append(
                {
                    "account_id": account_id,
                    "first_version": charge.account_version,
                    "month": month,
                    "transfers": 0,
                    "requests": 0,
                    "amount_nanos": 0,
                    "returned_nanos": 0,
                }
            )
        run = runs[-1]
        run["last_version"] = charge.account_version
        run["transfer_id"] = charge.id
        run["booked_at"] = charge.booked_at
        run["posted_after"] = charge.posted_after
        run["transfers"] += 1
        run["requests"] += counts[charge.id]
        run["amount_nanos"] += charge.amount_nanos
    for run in runs:
        statement = upsert(connection, archived_charges).values(**run)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["account_id", "first_version"],
                set_={name: statement.excluded[name] for name in run},
            )
        )


def _versions_between(
    connection: Connection, account_id: int, since: int, charges: Sequence[Row[Any]]
) -> Iterable[int]:
    """Return the versions of an account's transfers among the charges that stay."""
    gone = {charge.account_version for charge in charges}
    for side in (transfers.c.from_account, transfers.c.to_account):
        rows = connection.execute(
            select(transfers.c.account_version).where(
                side == account_id, transfers.c.id >= since, transfers.c.id <= charges[-1].id
            )
        ).scalars()
        yield from (version for version in rows if version not in gone)
