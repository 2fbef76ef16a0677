"""Monthly partitions of the tables that grow with traffic, on PostgreSQL; SQLite has one each.

A partition holds the rows of one month (UTC): ``receipts``, ``receipt_steps`` and ``outputs`` by
the time in the request id, ``transfers`` by the booking time. Rows of before the first month are in
``<table>_before_<month>``, and rows that belong to no partition in ``<table>_default``, so a row is
never refused. Months are created ahead; a new one takes its rows out of the default partition.

A request id is unique across all partitions. A transfer's id is unique by its sequence, its key
within a partition and, except for charges, in ``transfer_keys``. Foreign keys do not refer to these
tables, because they would forbid detaching a month; reconciliation checks the references.

Every change takes locks that bookings wait for, so it gives up after ``LOCK_S``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, text

from gateway.checks.months import month_of, next_month, span_of
from gateway.ids import first_request_id

LOCK_S: Final = 0.5
"""Maximum time for which bookings wait behind a change that waits for a lock itself. Shorter than
PostgreSQL's ``deadlock_timeout``, so that the change gives up and never a booking."""
MONTHS_AHEAD: Final = 3
COUNTED_MAX: Final = 10_000


def _at(moment: datetime) -> str:
    return moment.isoformat()


_KEYS: Final[Mapping[str, tuple[str, Callable[[datetime], str]]]] = {
    # Table → its partition key, and the key's smallest value at a moment.
    "transfers": ("booked_at", _at),
    "receipts": ("request_id", first_request_id),
    "receipt_steps": ("request_id", first_request_id),
    "outputs": ("request_id", first_request_id),
}
PARTITIONED: Final = tuple(_KEYS)
APPEND_ONLY: Final = ("transfers", "receipts", "receipt_steps")
_UNLIKE_METADATA: Final = ("transfer_keys", "receipt_id_bounds", "uq_transfers_key")

_NAME: Final = re.compile(
    rf"({'|'.join(PARTITIONED)})_(before_)?(20\d\d)_(0[1-9]|1[0-2])", re.ASCII
)
_LIST: Final = text(
    "SELECT c.relname, p.relname FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid "
    "LEFT JOIN pg_class p ON p.oid = i.inhparent "
    "WHERE c.relnamespace = CAST(current_schema() AS regnamespace) AND c.relkind = 'r' "
    "ORDER BY c.relname"
)


class Partition(NamedTuple):
    """The rows of one month of a table. ``name`` is that of its own table."""

    table: str
    month: str
    attached: bool

    @property
    def name(self) -> str:
        return f"{self.table}_{self.month.replace('-', '_')}"


def is_partitioned(connection: Connection) -> bool:
    """Whether the database keeps the large tables in partitions."""
    return connection.dialect.name == "postgresql"


def meet_partitions(connection: Connection) -> None:
    """Let a new connection to PostgreSQL read the catalog of all partitions. Otherwise it does so
    in its first statements on them, which then take 5 to 15 ms each."""
    if is_partitioned(connection):
        for table in PARTITIONED:
            connection.execute(text(f"SELECT * FROM {table} LIMIT 0"))


def list_partitions(connection: Connection, month: str | None = None) -> list[Partition]:
    """List the monthly partitions of all tables, or those of one month, detached ones included."""
    if not is_partitioned(connection):
        return []
    return [
        Partition(match[1], f"{match[3]}-{match[4]}", parent is not None)
        for match, parent in _named(connection)
        if match[2] is None and month in (None, f"{match[3]}-{match[4]}")
    ]


def create_month(connection: Connection, month: str) -> list[Partition]:
    """Create the partitions of a month that do not exist, with their rows of the default ones."""
    known = {partition.table for partition in list_partitions(connection, month)}
    made = [Partition(table, month, attached=True) for table in PARTITIONED if table not in known]
    if made:
        wait_briefly(connection)
    for partition in made:
        _create(connection, partition)
    return made


def create_ahead(connection: Connection, now: datetime) -> list[Partition]:
    """Create the partitions of this month and of ``MONTHS_AHEAD`` months after it.

    Months between the newest partition and this month, when nothing created any, are created too.
    """
    return [
        partition
        for month in missing_months(connection, now)
        for partition in create_month(connection, month)
    ]


def missing_months(connection: Connection, now: datetime) -> list[str]:
    """List the months for which ``create_ahead`` would create a partition."""
    if not is_partitioned(connection):
        return []
    months = [month_of(now)]
    for _ in range(MONTHS_AHEAD):
        months.append(next_month(months[-1]))
    last = months[-1]
    missing = set()
    for table in PARTITIONED:
        # The month of ``<table>_before_<month>`` is the first one with a partition.
        known = [
            (f"{match[3]}-{match[4]}", match[2] is None)
            for match, _ in _named(connection)
            if match[1] == table
        ]
        if not known:
            continue
        newest, exists = max(known)
        month = next_month(newest) if exists else newest
        while month <= last:
            missing.add(month)
            month = next_month(month)
    return sorted(missing)


def detach_month(connection: Connection, month: str) -> list[Partition]:
    """Detach the partitions of a month: their rows leave the tables, and stay unchangeable."""
    attached = [each for each in list_partitions(connection, month) if each.attached]
    if attached:
        wait_briefly(connection)
    for partition in attached:
        _run(connection, f"ALTER TABLE {partition.table} DETACH PARTITION {partition.name}")
        if partition.table in APPEND_ONLY:
            _run(
                connection,
                f"CREATE TRIGGER {partition.table}_append_only BEFORE UPDATE OR DELETE "
                f"ON {partition.name} FOR EACH ROW EXECUTE FUNCTION refuse_change()",
            )
    return [each._replace(attached=False) for each in attached]


def attach_month(connection: Connection, month: str) -> list[Partition]:
    """Attach the detached partitions of a month again, with their rows of the default ones."""
    detached = [each for each in list_partitions(connection, month) if not each.attached]
    if detached:
        wait_briefly(connection)
    for partition in detached:
        if partition.table in APPEND_ONLY:
            trigger = f"{partition.table}_append_only"
            _run(connection, f"DROP TRIGGER IF EXISTS {trigger} ON {partition.name}")
        _attach(connection, partition)
    return [each._replace(attached=True) for each in detached]


def drop_month(connection: Connection, month: str) -> list[Partition]:
    """Drop the detached partitions of a month. Raise ``ValueError`` if one is attached."""
    found = list_partitions(connection, month)
    for partition in found:
        if partition.attached:
            raise ValueError(f"{partition.name} is part of {partition.table}; detach it first")
    for partition in found:
        _run(connection, f"DROP TABLE {partition.name}")
    return found


def is_empty(connection: Connection, partition: Partition) -> bool:
    """Whether a partition has no rows."""
    found = connection.exec_driver_sql(f"SELECT EXISTS (SELECT FROM {partition.name})")
    return not found.scalar_one()


def drop_empty(connection: Connection, partition: Partition) -> bool:
    """Detach and drop a partition if it has no rows; return whether it had none.

    Rows of its month that are inserted later go to the default partition.
    """
    wait_briefly(connection)
    with contextlib.suppress(_HasRows), connection.begin_nested():
        _run(connection, f"ALTER TABLE {partition.table} DETACH PARTITION {partition.name}")
        # Nothing can be inserted any more.
        if not is_empty(connection, partition):
            raise _HasRows
        _run(connection, f"DROP TABLE {partition.name}")
        return True
    return False


class _HasRows(Exception):
    """Rows were inserted meanwhile."""


def create_again(connection: Connection, month: str) -> list[Partition]:
    """Create the partitions of a month that were dropped."""
    first = [f"{match[3]}-{match[4]}" for match, _ in _named(connection) if match[2] is not None]
    return create_month(connection, month) if first and month >= max(first) else []


def rows_in_default(connection: Connection) -> dict[str, int]:
    """Count the rows of each table that belong to no partition, up to ``COUNTED_MAX``."""
    if not is_partitioned(connection):
        return {}
    return {
        table: connection.exec_driver_sql(
            f"SELECT count(*) FROM (SELECT FROM {table}_default LIMIT {COUNTED_MAX}) AS stray"
        ).scalar_one()
        for table in PARTITIONED
    }


def is_described(
    item: Any, name: str | None, kind: str, reflected: bool, compared_with: Any
) -> bool:
    """Whether Alembic compares an object of a PostgreSQL database with the metadata, which
    describes tables without partitions."""
    if name is None or name in _UNLIKE_METADATA:
        return False
    if kind == "foreign_key_constraint":
        return item.referred_table.name not in PARTITIONED
    return not (kind == "table" and (_NAME.fullmatch(name) or name.endswith("_default")))


def _create(connection: Connection, partition: Partition) -> None:
    # Like the default partition, so with its own keys, which the table itself need not have.
    _run(
        connection,
        f"CREATE TABLE {partition.name} (LIKE {partition.table}_default INCLUDING ALL)",
    )
    _attach(connection, partition)


def _attach(connection: Connection, partition: Partition) -> None:
    table, name = partition.table, partition.name
    key, value_at = _KEYS[table]
    start, end = map(value_at, span_of(partition.month))
    rows = f"FROM {table}_default WHERE {key} >= '{start}' AND {key} < '{end}'"
    strays = connection.exec_driver_sql(f"SELECT EXISTS (SELECT {rows})").scalar_one()
    if strays:
        # Detached, the default partition has no trigger that refuses the move.
        _run(connection, f"ALTER TABLE {table} DETACH PARTITION {table}_default")
        _run(
            connection, f"WITH moved AS (DELETE {rows} RETURNING *) INSERT INTO {name} TABLE moved"
        )
    _run(
        connection,
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{start}') TO ('{end}')",
    )
    if strays:
        _run(connection, f"ALTER TABLE {table} ATTACH PARTITION {table}_default DEFAULT")


def _named(connection: Connection) -> Iterator[tuple[re.Match[str], str | None]]:
    """Yield the names of partitions that begin with a table's, and the table if attached."""
    for name, parent in connection.execute(_LIST):
        if match := _NAME.fullmatch(name):
            yield match, parent


def wait_briefly(connection: Connection) -> None:
    """Let the statements of this transaction give up a lock that they wait for ``LOCK_S``."""
    _run(connection, f"SET LOCAL lock_timeout = '{LOCK_S * 1000:.0f}ms'")


def _run(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement)
