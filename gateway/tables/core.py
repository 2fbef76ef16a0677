"""The SQL tables of accounts, ledger and billing, with the invariants that SQL can enforce.

An accepted request is a row of ``holds`` or a row of ``receipts``, never both. ``transfers``,
``receipts``, ``refunds``, ``prices``, ``price_periods`` and the tables of invoices are
append-only. Only customer accounts have a stored balance; those of system accounts are sums of
transfers. Money is BIGINT nano-dollars. For PostgreSQL's partitions see ``sql.partitions``.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
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
    false,
    text,
)

from gateway.sql.database import UtcDateTime

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite assigns numbers to an INTEGER primary key, but not to a BIGINT.
RowId: Final = BigInteger().with_variant(Integer, "sqlite")
RequestKey: Final = String(36)
"""``req_`` and 32 hexadecimal digits: a UUID of version 7, so newer ones sort later."""

OptionalJson: Final = JSON(none_as_null=True)

QUANTITIES: Final = (
    "input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "images",
    "video_ms",
    "audio_ms",
    "characters",
    "steps",
    "gpu_us",
)
"""Quantities of a usage besides requests; each is a column of ``receipts`` and ``usage_hourly``."""

SYSTEM_ACCOUNTS: Final = {"cash": 1, "revenue": 2, "promo": 3, "breakage": -1}
"""System accounts, the other side of every transfer: name → id; created by the migrations. What a
customer owes beyond its balance (a chargeback of spent money) is in ``receivable:<id>``."""

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
    # Default time zone of its budgets and reports.
    Column("report_tz", String(64), nullable=False, server_default="UTC"),
    # Given every month (UTC), as a lot that expires at the end of the month.
    Column("allowance_nanos", BigInteger, nullable=False, server_default="0"),
    # Whether it has budgets or concurrency limits, so that they are loaded only in this case.
    Column("bounded", Boolean, nullable=False, server_default=false()),
    # Number of open requests, without batch lines. No CHECK: a wrong count must not stop a charge.
    Column("open_requests", Integer, nullable=False, server_default="0"),
    # Whether it is or was a member of an organisation, so that its lock is taken only in this case.
    Column("organised", Boolean, nullable=False, server_default=false()),
    # Whether what is sent with its requests is kept as long as their outputs.
    Column("keep_inputs", Boolean, nullable=False, server_default=false()),
    CheckConstraint("kind IN ('customer', 'system')", name="kind"),
    CheckConstraint("status IN ('active', 'suspended', 'closed')", name="status"),
    CheckConstraint("held_nanos >= 0", name="held"),
    CheckConstraint("credit_limit_nanos >= 0", name="credit_limit"),
    CheckConstraint(
        "kind <> 'customer' OR posted_nanos - held_nanos >= -credit_limit_nanos", name="covered"
    ),
)

_LIMITED: Final = text("requests_per_minute IS NOT NULL OR tokens_per_minute IS NOT NULL")

keys = Table(
    "keys",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", String(200), nullable=False, server_default=""),
    Column("prefix", String(16), nullable=False, index=True),
    Column("secret_hash", LargeBinary(32), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    # Of keys with the scope ``admin``.
    Column("role", String(16)),
    # The member whose key it is, with that role in the account; written with ``members``.
    Column("user_id", RowId, ForeignKey("users.id"), index=True),
    Column("member_role", String(16)),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("spend_limit_nanos", BigInteger),
    # Names of the models that it may use; NULL: all.
    Column("models", OptionalJson),
    # The key that it replaces, which expires.
    Column("replaces", RowId, ForeignKey("keys.id"), index=True),
    Column("spent_nanos", BigInteger, nullable=False, server_default="0"),
    Column("held_nanos", BigInteger, nullable=False, server_default="0"),
    # As in its account.
    Column("open_requests", Integer, nullable=False, server_default="0"),
    CheckConstraint("held_nanos >= 0", name="held"),
    CheckConstraint("role IN ('operator', 'finance', 'auditor')", name="role"),
    CheckConstraint("member_role IN ('owner', 'member', 'viewer')", name="member_role"),
    CheckConstraint("(user_id IS NULL) = (member_role IS NULL)", name="member"),
    CheckConstraint(
        "spend_limit_nanos IS NULL OR spent_nanos + held_nanos <= spend_limit_nanos",
        name="spend_limit",
    ),
    Index("ix_keys_limited", "account_id", "id", sqlite_where=_LIMITED, postgresql_where=_LIMITED),
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
    # 0: list price; otherwise the account whose price override this is.
    Column("account_id", RowId, primary_key=True, autoincrement=False, server_default="0"),
    Column("effective_from", UtcDateTime, primary_key=True),
    # NULL ends an account's price override: from here on it pays the list price again.
    Column("price_id", RowId, ForeignKey("prices.id")),
    Column("source", String(16), nullable=False, server_default="catalog"),
    Column("actor", String(200), nullable=False, server_default=""),
    Column("reason", String(500), nullable=False, server_default=""),
    CheckConstraint("source IN ('catalog', 'operator')", name="source"),
    CheckConstraint("account_id <> 0 OR price_id IS NOT NULL", name="list"),
    Index(None, "account_id", "model", "effective_from"),
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
    # Budget windows in which it counts, as [budget, start in µs]; copied to its receipt.
    Column("windows", OptionalJson),
    # The model in whose queue it is, if not the one that was ordered.
    Column("served_by", String(200)),
    # For an incremental hold: output tokens covered so far, and why the stream was cut.
    Column("held_tokens", BigInteger),
    Column("cut", String(32)),
    Column("webhook", String(2000)),
    Column("service_class", String(16), nullable=False, server_default="standard"),
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
    # The customer's balance after this transfer, and the version of its account: each row can be
    # audited alone, and in version order each balance differs from the previous by the amount.
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
    # Finds transfers of rare kinds among any number of charges.
    Index(
        "ix_transfers_not_charges",
        "from_account",
        "id",
        sqlite_where=text("kind <> 'charge'"),
        postgresql_where=text("kind <> 'charge'"),
    ),
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
    *(Column(quantity, BigInteger, nullable=False) for quantity in QUANTITIES),
    Column("attributes", OptionalJson),
    Column("timings", JSON, nullable=False),
    Column("metadata", OptionalJson),
    Column("windows", OptionalJson),
    Column("error", OptionalJson),
    # For the operator: how it ran, and what it cost; NULL if that is not known.
    Column("run", OptionalJson),
    Column("expense_nanos", BigInteger),
    Column("service_class", String(16), nullable=False, server_default="standard"),
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
    Index(None, "settled_at", postgresql_using="brin"),
    Index(None, "model", "request_id"),
    # Find requests that did not succeed among any number that did, of an account and of all.
    Index(
        "ix_receipts_not_succeeded",
        "account_id",
        "status",
        "request_id",
        sqlite_where=text("status <> 'succeeded'"),
        postgresql_where=text("status <> 'succeeded'"),
    ),
    Index(
        "ix_receipts_not_succeeded_of_all",
        "status",
        "request_id",
        sqlite_where=text("status <> 'succeeded'"),
        postgresql_where=text("status <> 'succeeded'"),
    ),
)

refunds = Table(
    "refunds",
    metadata,
    # Refunds of charges, never more than the charge; ``correction`` if the price was wrong.
    Column("request_id", RequestKey, ForeignKey("receipts.request_id"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("amount_nanos", BigInteger, nullable=False),
    Column("transfer_id", RowId, ForeignKey("transfers.id"), nullable=False, unique=True),
    Column("booked_at", UtcDateTime, nullable=False, index=True),
    CheckConstraint("amount_nanos > 0", name="amount"),
    CheckConstraint("kind IN ('refund', 'correction')", name="kind"),
    Index(None, "account_id", "booked_at"),
)

lots = Table(
    "lots",
    metadata,
    # The credits that make up a positive balance; consumed by priority, expiry and id.
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("amount_nanos", BigInteger, nullable=False),
    Column("remaining_nanos", BigInteger, nullable=False),
    Column("priority", Integer, nullable=False, server_default="100"),
    Column("expires_at", UtcDateTime),
    Column("transfer_id", RowId, ForeignKey("transfers.id"), index=True),
    Column("created_at", UtcDateTime, nullable=False),
    CheckConstraint("kind IN ('paid', 'promo', 'free')", name="kind"),
    CheckConstraint("remaining_nanos >= 0 AND remaining_nanos <= amount_nanos", name="remaining"),
    Index(
        "ix_lots_open",
        "account_id",
        sqlite_where=text("remaining_nanos > 0"),
        postgresql_where=text("remaining_nanos > 0"),
    ),
    Index(
        "ix_lots_expiring",
        "expires_at",
        sqlite_where=text("remaining_nanos > 0 AND expires_at IS NOT NULL"),
        postgresql_where=text("remaining_nanos > 0 AND expires_at IS NOT NULL"),
    ),
)

budgets = Table(
    "budgets",
    metadata,
    # Of an account, or of all accounts of an organisation together.
    Column("id", RowId, primary_key=True),
    Column("account_id", RowId, ForeignKey("accounts.id"), index=True),
    Column("organisation_id", RowId, ForeignKey("organisations.id"), index=True),
    Column("key_id", RowId, ForeignKey("keys.id")),
    Column("model", String(200)),
    Column("name", String(200), nullable=False, server_default=""),
    Column("window", String(8), nullable=False),
    Column("tz", String(64), nullable=False),
    Column("limit_nanos", BigInteger, nullable=False),
    Column("hard", Boolean, nullable=False),
    # Whether the budgets of an organisation's accounts may sum to more than this one of it.
    Column("overallot", Boolean, nullable=False, server_default=false()),
    Column("created_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime),
    CheckConstraint("\"window\" IN ('hour', 'day', 'month', 'total')", name="window"),
    CheckConstraint("limit_nanos >= 0", name="limit"),
    CheckConstraint("(account_id IS NULL) <> (organisation_id IS NULL)", name="owner"),
    CheckConstraint("key_id IS NULL OR organisation_id IS NULL", name="key"),
)

budget_windows = Table(
    "budget_windows",
    metadata,
    # Amounts of the requests accepted in one window of a budget: held until they are settled.
    Column("budget_id", RowId, ForeignKey("budgets.id"), primary_key=True),
    Column("starts_us", BigInteger, primary_key=True, autoincrement=False, index=True),
    Column("limit_nanos", BigInteger, nullable=False),
    Column("spent_nanos", BigInteger, nullable=False, server_default="0"),
    Column("held_nanos", BigInteger, nullable=False, server_default="0"),
    Column("hard", Boolean, nullable=False),
    CheckConstraint("held_nanos >= 0", name="held"),
    CheckConstraint("NOT hard OR spent_nanos + held_nanos <= limit_nanos", name="limit"),
)

rate_limits = Table(
    "rate_limits",
    metadata,
    # Limits of an account or one key (0: all keys together), for one model ('': all together).
    Column("account_id", RowId, ForeignKey("accounts.id"), primary_key=True, autoincrement=False),
    Column("key_id", RowId, primary_key=True, autoincrement=False, index=True),
    Column("model", String(200), primary_key=True),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("concurrent_max", Integer),
    # Only per account: device time of cancelled work that was not charged.
    Column("cancelled_seconds_per_hour", Integer),
)

outputs = Table(
    "outputs",
    metadata,
    # Outputs of closed requests during their retention; receipts are kept longer.
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
    # Finds the lines of a batch by the prefix of their keys. The primary key uses a language's
    # collation, which can ignore the line breaks in these keys.
    Index(
        "ix_idempotency_lines",
        "account_id",
        "key",
        sqlite_where=text("key LIKE 'batch%'"),
        postgresql_where=text("key LIKE 'batch%'"),
        postgresql_ops={"key": "varchar_pattern_ops"},
    ),
)

periods = Table(
    "periods",
    metadata,
    # Accounting months (UTC). Bookings lock the month's row FOR SHARE, closing FOR UPDATE.
    Column("month", String(7), primary_key=True),
    Column("state", String(8), nullable=False, server_default="open"),
    Column("closed_at", UtcDateTime),
    Column("receipts", BigInteger),
    Column("charge_nanos", BigInteger),
    Column("transfers", BigInteger),
    Column("sha256", String(64)),
    CheckConstraint("state IN ('open', 'closing', 'closed')", name="state"),
    CheckConstraint(
        "month LIKE '20__-__' AND substr(month, 6) BETWEEN '01' AND '12'", name="month"
    ),
)

chores = Table(
    "chores",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("due_at", UtcDateTime, nullable=False),
)
