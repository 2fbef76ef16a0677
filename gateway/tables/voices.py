"""The SQL table of voices and consents; it shares the metadata of ``gateway.tables.core``.

Both are recordings. A row is written before its recording and deleted after it, so no blob is
without a row.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    String,
    Table,
    Text,
    text,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

RecordingKey: Final = String(40)
"""``voice_`` or ``cons_`` and 32 hexadecimal digits: a UUID of version 7, newer ones sort later."""
_NAMED: Final = text("clear_at IS NULL AND consent_id IS NOT NULL")

voice_recordings = Table(
    "voice_recordings",
    metadata,
    Column("id", RecordingKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("name", String(100), nullable=False),
    # Consent of a voice's speaker. NULL: this row is a consent.
    Column("consent_id", RecordingKey, ForeignKey("voice_recordings.id"), index=True),
    # Language of a consent.
    Column("language", String(35)),
    # Transcript of a voice's recording, if known.
    Column("transcript", Text, nullable=False, server_default=""),
    Column("description", Text, nullable=False, server_default=""),
    # A reference into the blob store: key, size, digest and type.
    Column("blob_key", String(400)),
    Column("bytes", BigInteger),
    Column("sha256", String(64)),
    Column("content_type", String(100)),
    Column("created_at", UtcDateTime, nullable=False),
    # NULL: available. Otherwise it is not found, because it is not stored yet or was deleted, and
    # can be erased from this time on.
    Column("clear_at", UtcDateTime, index=True),
    CheckConstraint("(consent_id IS NULL) <> (language IS NULL)", name="kind"),
    CheckConstraint("clear_at IS NOT NULL OR blob_key IS NOT NULL", name="stored"),
    Index(None, "account_id", "id"),
    Index(
        "uq_voice_recordings_name",
        "account_id",
        "name",
        unique=True,
        sqlite_where=_NAMED,
        postgresql_where=_NAMED,
    ),
)
