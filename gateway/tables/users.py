"""The SQL tables of people, of their accounts, and of their sessions and jobs in the console; they
share the metadata of ``core``."""

from __future__ import annotations

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
    UniqueConstraint,
    false,
    text,
)

from gateway.sql.database import UtcDateTime
from gateway.tables.core import OptionalJson, RequestKey, RowId, metadata

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
    # Columns that lists leave out, by list; a list that is not in it leaves out its usual ones.
    Column("columns", OptionalJson),
    # Read by gateways of the version before only, beside which this one is started.
    Column("hidden", String(200), nullable=False, server_default="task,tags"),
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

content_grants = Table(
    "content_grants",
    metadata,
    # Sight of prompts and outputs that an owner gives to operators for a while.
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("actor", String(200), nullable=False),
    Column("reason", String(500), nullable=False),
    Column("starts_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False, index=True),
    # Who ended it before its time, which moved ``ends_at``.
    Column("ended_by", String(200)),
)

content_asks = Table(
    "content_asks",
    metadata,
    # An operator asks for it; open until it is answered, or has waited for too long.
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("request_id", RequestKey),
    Column("actor", String(200), nullable=False),
    Column("reason", String(500), nullable=False),
    Column("asked_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False),
)

console_jobs = Table(
    "console_jobs",
    metadata,
    # Work that a page has started and does not wait for; any gateway shows how far it is.
    Column("id", String(32), primary_key=True),
    Column("kind", String(32), nullable=False),
    # Of what the result depends on, so that the same question is not computed twice.
    Column("digest", String(64), nullable=False),
    Column("starter", String(200), nullable=False),
    # Who may see it: those who may do this act, in this account; NULL: in the installation.
    Column("act", String(32), nullable=False),
    Column("account_id", RowId),
    # The page that shows the result.
    Column("back", String(4000), nullable=False),
    Column("state", String(12), nullable=False, server_default="running"),
    Column("done", BigInteger, nullable=False, server_default="0"),
    Column("total", BigInteger),
    Column("can_cancel", Boolean, nullable=False),
    Column("cancelling", Boolean, nullable=False, server_default=false()),
    Column("result", OptionalJson),
    Column("problem", String(1000), nullable=False, server_default=""),
    Column("started_at", UtcDateTime, nullable=False, index=True),
    # Written while it runs: one that is silent has ended with its gateway.
    Column("seen_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime),
    CheckConstraint("state IN ('running', 'done', 'failed', 'cancelled')", name="state"),
    Index(None, "kind", "digest"),
    # Two gateways do not run the same job.
    Index(
        "uq_console_jobs_running",
        "kind",
        "digest",
        unique=True,
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
)
