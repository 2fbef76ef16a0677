"""The SQL tables of notices; they share the metadata of ``core``.

An ``account_id`` of 0 is the operator. A notice is written with its deliveries, in one transaction.
``notice_deliveries`` and ``notice_attempts`` are an outbox, as ``webhook_deliveries`` is.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RowId, keys, metadata

notice_subscriptions = Table(
    "notice_subscriptions",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, nullable=False),
    # ``https://…``, or ``mailto:`` and an address.
    Column("url", String(2000), nullable=False),
    # NULL: all, also those of later versions.
    Column("kinds", OptionalJson),
    Column("created_at", UtcDateTime, nullable=False),
    # NULL: the receiver of mail has not agreed yet.
    Column("confirmed_at", UtcDateTime),
    UniqueConstraint("account_id", "url"),
    # Deliveries keep the number of a removed subscription.
    sqlite_autoincrement=True,
)

notices = Table(
    "notices",
    metadata,
    # ``notice_`` and a UUID of version 7, so newer ones sort later.
    Column("id", String(39), primary_key=True),
    # What it is about: a second notice with the same key is not written.
    Column("key", String(400), nullable=False, unique=True),
    Column("account_id", RowId, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("title", String(400), nullable=False),
    Column("text", Text, nullable=False),
    Column("data", JSON, nullable=False),
    # Kept beyond the retention, because what it is about can last longer.
    Column("lasting", Boolean, nullable=False, server_default=false()),
    Column("created_at", UtcDateTime, nullable=False),
    Index(None, "account_id", "id"),
    Index(None, "kind", "id"),
    # Of those that end with the retention.
    Index(
        "ix_notices_ending",
        "created_at",
        sqlite_where=text("lasting = 0"),
        postgresql_where=text("NOT lasting"),
    ),
)

notice_deliveries = Table(
    "notice_deliveries",
    metadata,
    Column("id", String(39), primary_key=True),
    Column(
        "notice_id",
        String(39),
        ForeignKey("notices.id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    # No foreign key: what was sent stays when its subscription is removed.
    Column("subscription_id", RowId, nullable=False, index=True),
    Column("account_id", RowId, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("url", String(2000), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("tried", Integer, nullable=False, server_default="0"),
    Column("due_at", UtcDateTime, nullable=False),
    Column("queued_at", UtcDateTime, nullable=False),
    Column("outcome", String(16)),
    Column("ended_at", UtcDateTime),
    CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="ended"),
    CheckConstraint("outcome IN ('delivered', 'gone', 'failed')", name="outcome"),
)
Index(
    "ix_notice_deliveries_open",
    notice_deliveries.c.account_id,
    notice_deliveries.c.due_at,
    sqlite_where=notice_deliveries.c.ended_at.is_(None),
    postgresql_where=notice_deliveries.c.ended_at.is_(None),
)

notice_attempts = Table(
    "notice_attempts",
    metadata,
    Column(
        "delivery_id",
        String(39),
        ForeignKey("notice_deliveries.id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("duration_ms", Integer, nullable=False),
    # HTTP status or SMTP reply of the receiver; without one, the class of the error.
    Column("code", Integer),
    Column("error", String(32)),
    # The first characters of what the receiver of a webhook answered.
    Column("answer", String(200)),
)

# Finds the keys of an account that expire soon among any number that do not.
Index(
    "ix_keys_expiring",
    keys.c.account_id,
    keys.c.expires_at,
    sqlite_where=keys.c.expires_at.is_not(None),
    postgresql_where=keys.c.expires_at.is_not(None),
)
