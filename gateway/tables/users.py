"""The SQL tables of people and of their accounts; they share the metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, String, Table, UniqueConstraint

from gateway.sql.database import UtcDateTime
from gateway.tables.core import RowId, metadata

users = Table(
    "users",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("name", String(200), nullable=False),
    Column("email", String(320), unique=True),
    # Identity at a provider of OpenID Connect.
    Column("issuer", String(500)),
    Column("subject", String(255)),
    # In the installation; NULL: only memberships.
    Column("role", String(16)),
    Column("status", String(16), nullable=False, server_default="active"),
    Column("created_at", UtcDateTime, nullable=False),
    Column("last_login_at", UtcDateTime),
    UniqueConstraint("issuer", "subject"),
    CheckConstraint("role IN ('operator', 'finance', 'auditor')", name="role"),
    CheckConstraint("status IN ('active', 'disabled')", name="status"),
    CheckConstraint("(issuer IS NULL) = (subject IS NULL)", name="identity"),
)

members = Table(
    "members",
    metadata,
    Column("user_id", RowId, ForeignKey("users.id"), primary_key=True, autoincrement=False),
    Column(
        "account_id",
        RowId,
        ForeignKey("accounts.id"),
        primary_key=True,
        autoincrement=False,
        index=True,
    ),
    Column("role", String(16), nullable=False),
    CheckConstraint("role IN ('owner', 'member', 'viewer')", name="role"),
)
