"""The SQL tables of people, of their accounts, and of their sessions in the console; they share the
metadata of ``core``."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
    false,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RowId, metadata

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

sessions = Table(
    "sessions",
    metadata,
    Column("id", RowId, primary_key=True),
    # Keyed hash of the cookie, which is replaced when the visitor proves again who it is.
    Column("token_hash", LargeBinary(32), nullable=False, unique=True),
    # Either a person or a key has entered.
    Column("user_id", RowId, ForeignKey("users.id"), index=True),
    Column("key_id", RowId, ForeignKey("keys.id"), index=True),
    Column("method", String(8), nullable=False),
    Column("csrf", LargeBinary(32), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Exact to a minute.
    Column("seen_at", UtcDateTime, nullable=False),
    # Moment at which the visitor last proved who it is.
    Column("proved_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False, index=True),
    Column("revoked_at", UtcDateTime),
    # First use after it was revoked; the audit log has it once.
    Column("refused_at", UtcDateTime),
    # Whether the cookie outlives the browser.
    Column("lasting", Boolean, nullable=False, server_default=false()),
    Column("network", String(64), nullable=False),
    Column("agent", String(200), nullable=False),
    # Choices of the visitor; NULL: all accounts, or the account's own zone.
    Column("account_id", RowId, ForeignKey("accounts.id")),
    Column("zone", String(64)),
    Column("theme", String(8), nullable=False, server_default="system"),
    # Session at the provider, by which it ends this one.
    Column("provider_sid", String(255), index=True),
    # A form that waits for a proof: its path and fields.
    Column("pending", OptionalJson),
    CheckConstraint("(user_id IS NULL) <> (key_id IS NULL)", name="visitor"),
    CheckConstraint("method IN ('link', 'key', 'oidc')", name="method"),
    CheckConstraint("theme IN ('system', 'light', 'dark')", name="theme"),
)

login_links = Table(
    "login_links",
    metadata,
    Column("id", RowId, primary_key=True),
    # Keyed hashes of the secret in the address, and of the code that can be typed instead.
    Column("token_hash", LargeBinary(32), nullable=False, unique=True),
    Column("code_hash", LargeBinary(32), nullable=False, index=True),
    Column("user_id", RowId, ForeignKey("users.id"), nullable=False, index=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False, index=True),
    Column("used_at", UtcDateTime),
    # Wrong codes, of any visitor, since it was made; too many void its code.
    Column("wrong_codes", Integer, nullable=False, server_default="0"),
)
