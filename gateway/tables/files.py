"""The SQL table of requests that have blobs; it shares the metadata of ``gateway.tables.core``.

A row is written before the first blob of its request and deleted after the last one, so no blob is
without a row.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, ForeignKey, Index, LargeBinary, String, Table, false

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RequestKey, RowId, metadata

media = Table(
    "media",
    metadata,
    # No foreign key: it is written before the hold, and stays if the request is refused.
    Column("request_id", RequestKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("task", String(40), nullable=False),
    # The request's input, for dialects that display it; NULL until all attachments are stored.
    Column("asked", LargeBinary),
    # Whether its owner deleted it, so that it is no longer found.
    Column("forgotten", Boolean, nullable=False, server_default=false()),
    # Time of the next check whether it can be deleted.
    Column("clear_at", UtcDateTime, nullable=False, index=True),
    Index(None, "account_id", "request_id"),
)
