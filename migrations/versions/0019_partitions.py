"""Receipts, their steps, outputs and transfers by month, on PostgreSQL. SQLite keeps one table each.

An existing table becomes the partition of all rows of before a month. Foreign keys to these tables
are dropped, because they would forbid detaching a month. The months' partitions are created
afterwards, by ``gateway.sql.partitions``; until then, new rows go to the default ones.

Revision: 0019
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

TABLES = {
    "receipts": "request_id",
    "receipt_steps": "request_id",
    "outputs": "request_id",
    "transfers": "booked_at",
}
REFERENCES = (
    ("receipts", "transfer_id", "transfers", "id"),
    ("refunds", "transfer_id", "transfers", "id"),
    ("lots", "transfer_id", "transfers", "id"),
    ("payments", "transfer_id", "transfers", "id"),
    ("refunds", "request_id", "receipts", "request_id"),
    ("receipt_steps", "request_id", "receipts", "request_id"),
    ("outputs", "request_id", "receipts", "request_id"),
    ("webhook_deliveries", "request_id", "receipts", "request_id"),
)
APPEND_ONLY = ("receipts", "receipt_steps", "transfers", "transfer_keys")
# Keys of one partition only: a key of the whole table would have to contain ``booked_at``.
LOCAL = ("pk_transfers", "uq_transfers_key")

LAG_S = 8 * 86_400
LEAD_S = 3_600
"""Usual age of a request id at settlement: up to a batch's window and a week of outage, and as much
in the future as clocks differ. Other ids are recorded by month."""
ID_AT = (
    "'req_' || lpad(to_hex(CAST(floor((extract(epoch FROM {moment}) + {seconds}) * 1000) "
    "AS bigint)), 12, '0')"
)
UNUSUAL = (
    f"{{row}}request_id < {ID_AT.format(moment='{row}settled_at', seconds=-LAG_S)} OR "
    f"{{row}}request_id >= {ID_AT.format(moment='{row}settled_at', seconds=LEAD_S)}"
)
MONTH = "to_char({row}settled_at AT TIME ZONE 'UTC', 'YYYY-MM')"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        return
    _check_order()
    for table, column, _, _ in REFERENCES:
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS fk_{table}_{column}")
    first = _first_month()
    for table, key in TABLES.items():
        _partition(table, key, first)
    op.execute("ALTER SEQUENCE transfers_id_seq OWNED BY transfers.id")
    _guard_keys()
    _record_unusual_ids()
    for table in APPEND_ONLY:
        _refuse_changes(table)


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        return
    op.execute("DROP TRIGGER receipts_unusual_id ON receipts")
    op.execute("DROP TRIGGER transfers_key ON transfers")
    for table in TABLES:
        _merge(table)
    op.execute("DROP TABLE transfer_keys, receipt_id_bounds")
    op.execute("DROP FUNCTION record_unusual_id()")
    op.execute("DROP FUNCTION record_transfer_key()")
    for table, column, target, target_column in REFERENCES:
        op.execute(
            f"ALTER TABLE {table} ADD CONSTRAINT fk_{table}_{column} "
            f"FOREIGN KEY ({column}) REFERENCES {target} ({target_column})"
        )
    for table in APPEND_ONLY[:3]:
        _refuse_changes(table)


def _check_order() -> None:
    """The database's collation must order hexadecimal digits by their value, as nearly all do."""
    digits = "0123456789abcdef"
    pairs = " AND ".join(f"'req_0{a}' < 'req_0{b}'" for a, b in pairwise(digits))
    if not op.get_bind().exec_driver_sql(f"SELECT {pairs}").scalar():
        raise RuntimeError(
            "the database's collation does not order request ids by time; use a database with "
            "another one, such as C.UTF-8"
        )


def _first_month() -> datetime:
    """The first month with partitions: the next one, or this one if nothing was booked yet."""
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    filled = " OR ".join(f"EXISTS (SELECT FROM {table})" for table in TABLES)
    if op.get_bind().exec_driver_sql(f"SELECT {filled}").scalar():
        month = (month + timedelta(days=31)).replace(day=1)
    return month


def _partition(table: str, key: str, first: datetime) -> None:
    """Put a new table with partitions in the place of an old one, which becomes the first."""
    if key == "request_id":
        border = f"req_{int(first.timestamp() * 1000):012x}"
    else:
        border = first.isoformat()
    old, rest = f"{table}_before_{first:%Y_%m}", f"{table}_default"
    if table in APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
    indexes, keys = _indexes(table), _constraints(table)
    op.execute(f"ALTER TABLE {table} RENAME TO {old}")
    for name in (
        *indexes,
        *(name for name, definition in keys.items() if "FOREIGN" not in definition),
    ):
        op.execute(f"ALTER INDEX {name} RENAME TO {name}_before")
    op.execute(f"CREATE TABLE {rest} (LIKE {old} INCLUDING ALL)")
    op.execute(
        f"CREATE TABLE {table} (LIKE {old} INCLUDING ALL EXCLUDING INDEXES) "
        f"PARTITION BY RANGE ({key})"
    )
    for name, definition in keys.items():
        if name not in LOCAL:
            op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}")
    for definition in indexes.values():
        op.execute(definition)
    # Ids that are not made of a time can be anywhere.
    op.execute(
        f"WITH moved AS (DELETE FROM {old} WHERE {key} >= '{border}' RETURNING *) "
        f"INSERT INTO {rest} TABLE moved"
    )
    op.execute(
        f"ALTER TABLE {table} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ('{border}')"
    )
    op.execute(f"ALTER TABLE {table} ATTACH PARTITION {rest} DEFAULT")


def _merge(table: str) -> None:
    """Copy all partitions of a table into one table in its place."""
    whole, first = f"{table}_whole", _partitions(table)[0]
    indexes, keys = _indexes(table), _constraints(table)
    if table == "transfers":
        keys.update(pk_transfers="PRIMARY KEY (id)", uq_transfers_key="UNIQUE (key)")
    op.execute(f"CREATE TABLE {whole} (LIKE {first} INCLUDING ALL EXCLUDING INDEXES)")
    op.execute(f"INSERT INTO {whole} SELECT * FROM {table}")
    if table == "transfers":
        op.execute("ALTER SEQUENCE transfers_id_seq OWNED BY transfers_whole.id")
    op.execute(f"DROP TABLE {table}")
    op.execute(f"ALTER TABLE {whole} RENAME TO {table}")
    for name, definition in keys.items():
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition}")
    for definition in indexes.values():
        op.execute(definition.replace(" ON ONLY ", " ON "))


def _guard_keys() -> None:
    """Keys of all transfers but charges, whose requests are charged once by their own keys."""
    op.create_table(
        "transfer_keys",
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_transfer_keys")),
    )
    op.execute("INSERT INTO transfer_keys SELECT key FROM transfers WHERE kind <> 'charge'")
    op.execute(
        "CREATE FUNCTION record_transfer_key() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO transfer_keys (key) VALUES (NEW.key); RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER transfers_key AFTER INSERT ON transfers FOR EACH ROW "
        "WHEN (NEW.kind <> 'charge') EXECUTE FUNCTION record_transfer_key()"
    )


def _record_unusual_ids() -> None:
    """The smallest and the largest unusual request id of each month, by settlement.

    With them, a query for a month reads few partitions and still finds every receipt.
    """
    op.create_table(
        "receipt_id_bounds",
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("first_id", sa.String(length=36), nullable=False),
        sa.Column("last_id", sa.String(length=36), nullable=False),
        sa.PrimaryKeyConstraint("month", name=op.f("pk_receipt_id_bounds")),
    )
    op.execute(
        f"INSERT INTO receipt_id_bounds SELECT {MONTH.format(row='')}, min(request_id), "
        f"max(request_id) FROM receipts WHERE {UNUSUAL.format(row='')} GROUP BY 1"
    )
    op.execute(
        "CREATE FUNCTION record_unusual_id() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"DECLARE settled varchar := {MONTH.format(row='NEW.')}; BEGIN "
        # Read first, because an upsert would lock the row until the booking is committed.
        "IF NOT EXISTS (SELECT FROM receipt_id_bounds WHERE month = settled "
        "AND NEW.request_id BETWEEN first_id AND last_id) THEN "
        "INSERT INTO receipt_id_bounds AS known VALUES (settled, NEW.request_id, NEW.request_id) "
        "ON CONFLICT (month) DO UPDATE SET first_id = LEAST(known.first_id, EXCLUDED.first_id), "
        "last_id = GREATEST(known.last_id, EXCLUDED.last_id); END IF; RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER receipts_unusual_id AFTER INSERT ON receipts FOR EACH ROW "
        f"WHEN ({UNUSUAL.format(row='NEW.')}) EXECUTE FUNCTION record_unusual_id()"
    )


def _refuse_changes(table: str) -> None:
    """What is booked is never edited or deleted, whoever asks."""
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION refuse_change()"
    )


def _indexes(table: str) -> dict[str, str]:
    """Names and definitions of a table's indexes, without those of its constraints."""
    return _read(
        "SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM pg_index i "
        "JOIN pg_class c ON c.oid = i.indexrelid "
        f"WHERE i.indrelid = '{table}'::regclass AND NOT EXISTS "
        "(SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid AND k.contype <> 'f')"
    )


def _constraints(table: str) -> dict[str, str]:
    """Names and definitions of a table's primary, unique and foreign keys."""
    return _read(
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
        f"WHERE conrelid = '{table}'::regclass AND contype IN ('p', 'u', 'f') ORDER BY contype"
    )


def _partitions(table: str) -> list[str]:
    return list(
        _read(
            "SELECT c.relname, '' FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            f"WHERE i.inhparent = '{table}'::regclass ORDER BY c.relname"
        )
    )


def _read(query: str) -> dict[str, str]:
    return dict(op.get_bind().exec_driver_sql(query).all())
