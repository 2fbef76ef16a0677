"""The SQL tables of files and batches; they share the metadata of ``gateway.tables.core``.

A batch is run by the gateway that holds its lease; each update of a running batch checks its token.
``batch_results`` has a row for each line that has ended, until they are written into files.
``batch_discounts`` is append-only.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RequestKey, RowId, metadata

FileKey: Final = String(40)
"""``file-`` and 32 hexadecimal digits: a UUID of version 7, so newer ones sort later."""
BatchKey: Final = String(40)
"""``batch_`` and 32 hexadecimal digits: a UUID of version 7."""

files = Table(
    "files",
    metadata,
    Column("id", FileKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("purpose", String(20), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    # A reference into the blob store: key, digest and type.
    Column("blob_key", String(400), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("content_type", String(100), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, index=True),
    CheckConstraint("purpose IN ('batch', 'batch_output', 'vision', 'user_data')", name="purpose"),
    Index(None, "account_id", "id"),
    Index("ix_files_account_id_bytes", "account_id", "bytes"),
)

storage_limits = Table(
    "storage_limits",
    metadata,
    # Limits of single accounts; NULL: that of the installation.
    Column("account_id", RowId, ForeignKey("accounts.id"), primary_key=True, autoincrement=False),
    Column("files_max", BigInteger),
    Column("bytes_max", BigInteger),
)

file_reservations = Table(
    "file_reservations",
    metadata,
    # Space reserved for files before and during upload, until the file's row exists or it expires.
    Column("file_id", FileKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("id", BatchKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("key_id", RowId, ForeignKey("keys.id"), nullable=False),
    Column("endpoint", String(60), nullable=False),
    # No foreign key: files can be deleted once the batch has ended.
    Column("input_file_id", FileKey, nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("metadata", OptionalJson),
    Column("status", String(16), nullable=False),
    # The model, if all lines name the same one.
    Column("model", String(200)),
    # Number of lines, once the file has been checked, and of those that have ended.
    Column("total", Integer, nullable=False, server_default="0"),
    Column("completed", Integer, nullable=False, server_default="0"),
    Column("failed", Integer, nullable=False, server_default="0"),
    Column("input_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_input_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cost_nanos", BigInteger, nullable=False, server_default="0"),
    # Sum of the quotes of its lines, once the file has been checked.
    Column("most_nanos", BigInteger),
    Column("errors", OptionalJson),
    # Final status, which it gets once its files are written.
    Column("ending", String(16)),
    Column("output_file_id", FileKey),
    Column("error_file_id", FileKey),
    # Retention of its output files, in seconds.
    Column("output_expires_s", Integer),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("in_progress_at", UtcDateTime),
    Column("finalizing_at", UtcDateTime),
    Column("cancelling_at", UtcDateTime),
    # Time at which it reached its final status.
    Column("ended_at", UtcDateTime, index=True),
    Column("lease_token", String(32)),
    Column("lease_until", UtcDateTime),
    CheckConstraint(
        "status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', "
        "'cancelling', 'cancelled')",
        name="status",
    ),
    CheckConstraint("completed + failed <= total", name="counts"),
    Index(None, "account_id", "id"),
    Index(None, "input_file_id"),
)

batch_results = Table(
    "batch_results",
    metadata,
    Column("batch_id", BatchKey, ForeignKey("batches.id"), primary_key=True),
    # Line number in the input file, from 1.
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("succeeded", Boolean, nullable=False),
    Column("request_id", RequestKey),
    # JSON line of the output or error file.
    Column("result", LargeBinary, nullable=False),
)

batch_discounts = Table(
    "batch_discounts",
    metadata,
    # Batch discount of a model from a moment on, as a decimal share; NULL: not sold in batches.
    Column("model", String(200), primary_key=True),
    Column("effective_from", UtcDateTime, primary_key=True),
    Column("discount", String(12)),
)
