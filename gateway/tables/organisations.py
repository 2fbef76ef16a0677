"""The SQL tables of organisations, which group accounts; they share the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, String, Table

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

organisations = Table(
    "organisations",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("created_at", UtcDateTime, nullable=False),
)

organisation_accounts = Table(
    "organisation_accounts",
    metadata,
    # Each stay of an account in an organisation; written under the locks of both.
    Column("id", RowId, primary_key=True),
    Column("organisation_id", RowId, ForeignKey("organisations.id"), nullable=False, index=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("joined_at", UtcDateTime, nullable=False),
    Column("left_at", UtcDateTime),
)
# An account is a member of one organisation at a time.
Index(
    "uq_organisation_accounts_current",
    organisation_accounts.c.account_id,
    unique=True,
    sqlite_where=organisation_accounts.c.left_at.is_(None),
    postgresql_where=organisation_accounts.c.left_at.is_(None),
)
