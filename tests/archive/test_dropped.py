"""Partitions that become empty when their month is archived are dropped, and created again."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import Connection, text

from gateway.archive import lifecycle
from gateway.checks.months import next_month
from gateway.failpoints import Failpoint
from gateway.ids import first_request_id
from gateway.sql.partitions import PARTITIONED, create_month, list_partitions
from tests.archive.months import MARCH, MONTH, Month, make_month
from tests.archive.test_archive import Killed
from tests.databases import Databases


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Databases:
    return Databases("postgresql", tmp_path_factory.mktemp("databases"), postgres)


@pytest.fixture(scope="module")
def month_on_both(databases: Databases) -> Month:
    """March, whose partitions have been there from its beginning."""
    made = make_month(databases.make())
    with made.database.transaction() as connection:
        # Nothing but workflows and charges; without the triggers that keep rows as they are.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text("DELETE FROM outputs"))
        _begin_with_march(connection)
    made.database.dispose()
    return made


def _begin_with_march(connection: Connection) -> None:
    """Create the partitions that a database has whose first month is March."""
    first = min(each.month for each in list_partitions(connection))
    for table in PARTITIONED:
        old, new = f"{table}_before_{first.replace('-', '_')}", f"{table}_before_2026_03"
        key, start = ("request_id", first_request_id(MARCH))
        if table == "transfers":
            key, start = ("booked_at", MARCH.isoformat())
        for statement in (
            f"ALTER TABLE {table} DETACH PARTITION {old}",
            f"ALTER TABLE {old} RENAME TO {new}",
            f"WITH moved AS (DELETE FROM {new} WHERE {key} >= '{start}' RETURNING *) "
            f"INSERT INTO {table}_default TABLE moved",
            f"ALTER TABLE {table} ATTACH PARTITION {new} FOR VALUES FROM (MINVALUE) TO ('{start}')",
        ):
            connection.exec_driver_sql(statement)
    month = MONTH
    while month < first:
        create_month(connection, month)
        month = next_month(month)


def partitions(month: Month) -> set[str]:
    with month.database.snapshot() as connection:
        return {each.table for each in list_partitions(connection, MONTH)}


@pytest.mark.parametrize("killed_at", [1, 2])
def test_archiving_killed_while_partitions_are_dropped_loses_nothing(
    killed_at: int, march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = march.rows()
    assert partitions(march) == {*PARTITIONED}
    reached: Counter[str] = Counter()

    def reach(point: Failpoint) -> None:
        reached[point] += 1
        if point == "archive_dropped" and reached[point] == killed_at:
            raise Killed

    monkeypatch.setattr(lifecycle, "reach", reach)
    with pytest.raises(Killed):
        march.archive()
    monkeypatch.undo()

    assert len(partitions(march)) == len(PARTITIONED) - killed_at
    assert march.findings() == []
    # The receipts and the charge of a refund stay.
    assert march.archive().state == "removed"
    assert partitions(march) == {"receipts", "transfers"}
    assert march.findings() == []
    march.restore()
    assert partitions(march) == {*PARTITIONED}
    assert march.rows() == before
    assert march.findings() == []
