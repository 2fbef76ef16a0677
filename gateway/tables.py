"""Every SQL table, with the invariants that SQL can hold.

An accepted request is a row in ``holds`` or a row in ``receipts``, never both. ``transfers``,
``receipts``, ``prices`` and ``price_periods`` are only ever inserted into. Only customers' accounts
have a stored balance; those of the system are sums of transfers. Money is BIGINT nano-dollars.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

from gateway.database import UtcDateTime

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers the rows of an INTEGER primary key by itself, but not those of a BIGINT.
RowId: Final = BigInteger().with_variant(Integer, "sqlite")
RequestKey: Final = String(36)
"""``req_`` and 32 hexadecimal digits: a UUID of version 7, so newer ones sort later."""

OptionalJson: Final = JSON(none_as_null=True)

SYSTEM_ACCOUNTS: Final = {"cash": 1, "revenue": 2, "promo": 3}
"""Name → id of the accounts on the other side of every transfer; made by the first migration."""

accounts = Table(
    "accounts",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False, server_default="active"),
    Column("posted_nanos", BigInteger, nullable=False, server_default="0"),
    Column("held_nanos", BigInteger, nullable=False, server_default="0"),
    Column("credit_limit_nanos", BigInteger, nullable=False, server_default="0"),
    Column("version", BigInteger, nullable=False, server_default="0"),
    Column("created_at", UtcDateTime, nullable=False),
    CheckConstraint("kind IN ('customer', 'system')", name="kind"),
    CheckConstraint("status IN ('active', 'suspended', 'closed')", name="status"),
    CheckConstraint("held_nanos >= 0", name="held"),
    CheckConstraint("credit_limit_nanos >= 0", name="credit_limit"),
    CheckConstraint(
        "kind <> 'customer' OR posted_nanos - held_nanos >= -credit_limit_nanos", name="covered"
    ),
)

keys = Table(
    "keys",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", String(200), nullable=False, server_default=""),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", LargeBinary(32), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("spend_limit_nanos", BigInteger),
    Column("spent_nanos", BigInteger, nullable=False, server_default="0"),
    Column("held_nanos", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("held_nanos >= 0", name="held"),
    CheckConstraint(
        "spend_limit_nanos IS NULL OR spent_nanos + held_nanos <= spend_limit_nanos",
        name="spend_limit",
    ),
)

prices = Table(
    "prices",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("model", String(200), nullable=False),
    Column("components", JSON, nullable=False),
    Column("minimum_nanos", BigInteger, nullable=False),
    Column("content_sha256", String(64), nullable=False),
    UniqueConstraint("model", "content_sha256"),
    CheckConstraint("minimum_nanos >= 0", name="minimum"),
)

price_periods = Table(
    "price_periods",
    metadata,
    Column("model", String(200), primary_key=True),
    # 0 is the list price; a price of one account's own will stand here under its id.
    Column("account_id", RowId, primary_key=True, autoincrement=False, server_default="0"),
    Column("effective_from", UtcDateTime, primary_key=True),
    Column("price_id", RowId, ForeignKey("prices.id"), nullable=False),
)

holds = Table(
    "holds",
    metadata,
    Column("request_id", RequestKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("key_id", RowId, ForeignKey("keys.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("task", String(40), nullable=False),
    Column("price_id", RowId, ForeignKey("prices.id"), nullable=False),
    Column("hold_nanos", BigInteger, nullable=False),
    Column("job", LargeBinary, nullable=False),
    Column("metadata", OptionalJson),
    Column("webhook", String(2000)),
    Column("accepted_at", UtcDateTime, nullable=False),
    Column("deadline_at", UtcDateTime, nullable=False, index=True),
    CheckConstraint("hold_nanos >= 0", name="hold"),
)

transfers = Table(
    "transfers",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("key", String(200), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("from_account", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("to_account", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("amount_nanos", BigInteger, nullable=False),
    # The customer's balance after this transfer, and its account's version: any row can be audited
    # alone, and in version order each differs from the one before by exactly its amount.
    Column("posted_after", BigInteger, nullable=False),
    Column("account_version", BigInteger, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("reason", String(500), nullable=False, server_default=""),
    Column("booked_at", UtcDateTime, nullable=False),
    CheckConstraint("amount_nanos > 0", name="amount"),
    CheckConstraint("from_account <> to_account", name="accounts"),
    CheckConstraint(
        "kind IN ('charge', 'topup', 'grant', 'refund', 'expiry', 'rebate', 'chargeback', "
        "'correction')",
        name="kind",
    ),
    Index(None, "from_account", "id"),
    Index(None, "to_account", "id"),
)

receipts = Table(
    "receipts",
    metadata,
    Column("request_id", RequestKey, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("key_id", RowId, ForeignKey("keys.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("task", String(40), nullable=False),
    Column("price_id", RowId, ForeignKey("prices.id"), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("hold_nanos", BigInteger, nullable=False),
    Column("charge_nanos", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("images", BigInteger, nullable=False),
    Column("video_ms", BigInteger, nullable=False),
    Column("audio_ms", BigInteger, nullable=False),
    Column("characters", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("gpu_us", BigInteger, nullable=False),
    Column("attributes", OptionalJson),
    Column("timings", JSON, nullable=False),
    Column("metadata", OptionalJson),
    Column("error", OptionalJson),
    Column("accepted_at", UtcDateTime, nullable=False),
    Column("settled_at", UtcDateTime, nullable=False),
    Column("transfer_id", RowId, ForeignKey("transfers.id")),
    CheckConstraint("charge_nanos >= 0 AND charge_nanos <= hold_nanos", name="charge"),
    CheckConstraint("outcome IN ('charged', 'released')", name="outcome"),
    CheckConstraint("status IN ('succeeded', 'failed', 'cancelled', 'expired')", name="status"),
    CheckConstraint(
        "(outcome = 'charged') = (charge_nanos > 0) AND (outcome = 'charged') = "
        "(transfer_id IS NOT NULL)",
        name="charged",
    ),
    Index(None, "account_id", "settled_at", "request_id"),
    Index(None, "account_id", "request_id"),
    Index(None, "key_id", "settled_at", "request_id"),
    Index(None, "transfer_id"),
)

outputs = Table(
    "outputs",
    metadata,
    # What a finished request gave, for as long as it may be fetched; the receipt outlives it.
    Column("request_id", RequestKey, ForeignKey("receipts.request_id"), primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False, index=True),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("account_id", RowId, ForeignKey("accounts.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_id", RequestKey, nullable=False),
    Column("body_sha256", LargeBinary(32), nullable=False),
    Column("created_at", UtcDateTime, nullable=False, index=True),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("request_id", RequestKey, ForeignKey("receipts.request_id"), primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("url", String(2000), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due_at", UtcDateTime, nullable=False, index=True),
)
