"""Archiving removes a verified month, and restoring brings back the same rows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.exc import DBAPIError

from gateway.archive import lifecycle
from gateway.archive.files import ArchiveDamaged
from gateway.archive.lifecycle import CannotArchive
from gateway.archive.marks import list_archives
from gateway.audit_log import Author
from gateway.billing.statements.statement import statement
from gateway.failpoints import Failpoint
from gateway.tables.archives import archives
from gateway.tables.audit import audit_events
from gateway.tables.core import chores, receipts, transfers
from tests.archive.months import APRIL, AUTHOR, MARCH, MONTH, Month

POINTS = {
    "archive_begun": 1,
    "archive_written": 1,
    "archive_verified": 1,
    "archive_removing": 1,
    "archive_batch": 4,
    "archive_removed": 1,
    "restore_begun": 1,
    "restore_batch": 4,
    "restore_inserted": 1,
}
"""Points at which a command is killed, and the time at which it is reached."""


def left(month: Month) -> tuple[int, int]:
    """Return the number of receipts and charges of March that are in the database."""
    with month.database.snapshot() as connection:
        return (
            connection.execute(
                select(func.count()).where(receipts.c.settled_at < APRIL)
            ).scalar_one(),
            connection.execute(
                select(func.count()).where(
                    transfers.c.booked_at < APRIL, transfers.c.kind == "charge"
                )
            ).scalar_one(),
        )


class Killed(BaseException):
    """The process ends here: nothing of it runs any more, and what is committed stays."""


def kill_at(monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    reached: Counter[str] = Counter()

    def reach(point: Failpoint) -> None:
        reached[point] += 1
        if point == killed and reached[point] == POINTS[killed]:
            raise Killed

    monkeypatch.setattr(lifecycle, "reach", reach)


def test_month_is_archived_and_restored_bit_for_bit(march: Month) -> None:
    before, balances = march.rows(), (march.books.balance(), march.other.balance())
    with march.database.snapshot() as connection:
        drawn = statement(connection, march.books.account.id, MONTH)

    made = march.archive()

    # Three receipts of the refunded charge, and the one whose output is kept.
    assert left(march) == (4, 2)
    assert (made.state, made.removed_receipts) == ("removed", len(before["receipts"]) - 4 - 4)
    assert march.findings() == []
    with march.database.snapshot() as connection:
        assert statement(connection, march.books.account.id, MONTH) == drawn
    assert march.restore() == len(before["receipts"]) - 4
    assert march.rows() == before
    assert march.findings() == []
    assert (march.books.balance(), march.other.balance()) == balances
    with march.database.snapshot() as connection:
        assert list_archives(connection) == []
        acts = select(audit_events.c.act).where(audit_events.c.subject == f"month {MONTH}")
        recorded = connection.execute(acts.order_by(audit_events.c.id)).scalars().all()
    assert recorded == ["period.close", "period.archive", "period.archive", "period.restore"]


@pytest.mark.parametrize("point", POINTS)
def test_killed_command_loses_nothing_and_is_completed_by_the_next(
    point: str, one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(point, one_march, monkeypatch)


@pytest.mark.parametrize("point", ["archive_batch", "restore_batch"])
def test_batches_are_killed_and_completed_on_both_databases(
    point: str, march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(point, march, monkeypatch)


def killed(point: str, march: Month, monkeypatch: pytest.MonkeyPatch) -> None:
    before = march.rows()
    archiving = point.startswith("archive")
    if not archiving:
        march.archive()
    kill_at(monkeypatch, point)

    with pytest.raises(Killed):
        march.archive() if archiving else march.restore()
    monkeypatch.undo()

    assert march.findings() == []
    if archiving:
        march.archive()
        assert left(march) == (4, 2)
    march.restore()
    assert march.rows() == before
    assert march.findings() == []


def test_restore_that_was_killed_after_its_end_is_complete(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = one_march.rows()
    one_march.archive()
    monkeypatch.setitem(POINTS, "restore_ended", 1)
    kill_at(monkeypatch, "restore_ended")

    with pytest.raises(Killed):
        one_march.restore()

    assert one_march.rows() == before
    with pytest.raises(LookupError, match="not archived"):
        one_march.restore()


def test_keeping_removes_nothing_and_can_be_undone(one_march: Month) -> None:
    before = one_march.rows()

    made = one_march.archive(keep=True)

    assert (made.state, made.removed_receipts) == ("verified", 0)
    assert one_march.rows() == before
    assert one_march.restore() == 0
    with one_march.database.snapshot() as connection:
        assert list_archives(connection) == []


def test_damaged_file_is_refused_and_nothing_changes(one_march: Month) -> None:
    made = one_march.archive()
    assert made.manifest is not None
    after = one_march.rows()
    file = made.manifest.files[0]
    folder = one_march.blobs._directory
    assert folder is not None
    stored = folder / file.key
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)

    with pytest.raises(ArchiveDamaged, match="SHA-256"):
        one_march.restore()

    assert one_march.rows() == after
    with one_march.database.snapshot() as connection:
        assert [each.state for each in list_archives(connection)] == ["removed"]
    assert one_march.findings() == []


def test_files_that_differ_from_the_database_are_not_accepted(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = one_march.rows()
    write_file = lifecycle.write_file

    def write_other(key: str, name: Any, pages: Any) -> Any:
        if name == "receipts":
            other = pages[0].column("timings").to_pylist()
            place = pages[0].schema.get_field_index("timings")
            changed = [other[0].replace("15", "16"), *other[1:]]
            pages = [pages[0].set_column(place, "timings", [changed]), *pages[1:]]
        return write_file(key, name, pages)

    monkeypatch.setattr(lifecycle, "write_file", write_other)

    with pytest.raises(ArchiveDamaged, match="not those in the database"):
        one_march.archive()

    assert one_march.rows() == before


def test_only_the_archive_of_a_sealed_month_lets_its_rows_be_deleted(march: Month) -> None:
    def refused(statement: Any) -> None:
        with pytest.raises(DBAPIError), march.database.transaction() as connection:
            connection.execute(statement)

    of_march = receipts.c.settled_at < APRIL
    refused(delete(receipts).where(of_march))
    march.archive(keep=True)
    refused(delete(receipts).where(of_march))
    refused(update(archives).values(state="removed"))
    refused(update(archives).values(sha256="0" * 64))
    refused(
        archives.insert().values(
            month="2026-04", state="writing", nonce="x", sha256="0" * 64, changed_at=APRIL
        )
    )

    with march.database.transaction() as connection:
        connection.execute(update(archives).values(state="removing"))

    refused(delete(receipts).where(receipts.c.settled_at >= APRIL))
    refused(delete(transfers).where(transfers.c.kind == "topup"))
    refused(update(receipts).values(reason="other"))
    march.archive()
    refused(delete(archives))
    refused(delete(receipts).where(of_march))


def test_month_that_is_open_or_not_summed_up_is_refused(one_march: Month) -> None:
    for month, reason in (("2026-04", "is not closed"), ("2026-4", "not a month")):
        with pytest.raises(CannotArchive, match=reason):
            asyncio.run(one_march.archiver().archive(month))
    with one_march.database.transaction() as connection:
        connection.execute(text("DELETE FROM usage_hours"))

    with pytest.raises(CannotArchive, match="hourly sums"):
        one_march.archive()


def test_metadata_with_a_retention_is_not_archived(one_march: Month) -> None:
    archiver = lifecycle.Archiver(
        one_march.database, one_march.blobs, AUTHOR, metadata_expires=True
    )

    with pytest.raises(CannotArchive, match="still have metadata"):
        asyncio.run(archiver.archive(MONTH))


def test_one_command_archives_at_a_time(one_march: Month) -> None:
    async def both() -> list[Any]:
        commands = (one_march.archiver().archive(MONTH) for _ in range(2))
        return await asyncio.gather(*commands, return_exceptions=True)

    results = asyncio.run(both())

    assert sorted(isinstance(each, CannotArchive) for each in results) == [False, True]
    assert one_march.findings() == []


def test_what_becomes_free_is_removed_by_the_next_run(march: Month) -> None:
    before = march.rows()
    march.archive()
    with march.database.transaction() as connection:
        connection.execute(text("DELETE FROM outputs"))

    march.archive()

    assert left(march) == (3, 1)
    assert march.findings() == []
    march.restore()
    assert march.rows() == before
    assert march.findings() == []


def test_command_killed_by_the_system_is_completed(one_march: Month) -> None:
    before = one_march.rows()
    folder = one_march.blobs._directory
    environment = {**os.environ, "DATABASE_URL": one_march.url, "BLOB_URL": f"file://{folder}"}

    def run(*arguments: str, point: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gateway", "archive", *arguments],
            env={**environment, "TOLLGATE_FAILPOINT": point},
            capture_output=True, check=False, text=True,
        )  # fmt: skip

    assert run(MONTH, point="archive_batch").returncode == -signal.SIGKILL
    with pytest.raises(CannotArchive, match="less than 60 s ago"):
        one_march.archive()
    with one_march.database.transaction() as connection:
        connection.execute(update(chores).values(due_at=MARCH))
    completed = run(MONTH)
    assert "removed" in completed.stdout, completed.stderr
    restored = run("restore", MONTH)

    assert restored.returncode == 0, restored.stderr
    assert one_march.rows() == before


def test_author_is_in_the_audit_log(one_march: Month) -> None:
    archiver = lifecycle.Archiver(
        one_march.database, one_march.blobs, Author("ann", "cli", reason="room")
    )

    asyncio.run(archiver.archive(MONTH))

    with one_march.database.snapshot() as connection:
        query = select(audit_events).where(audit_events.c.act == "period.archive")
        events = connection.execute(query.order_by(audit_events.c.id)).all()
    assert {(each.actor, each.reason) for each in events} == {("ann", "room")}
    assert events[1].after["removed_receipts"] == list_archives_count(one_march)


def list_archives_count(month: Month) -> int:
    with month.database.snapshot() as connection:
        return list_archives(connection)[0].removed_receipts
