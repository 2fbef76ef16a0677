"""The gateway's settings: environment variables → one frozen object, read once at start.

``docs/reference/settings.md`` lists every setting with its default; a test keeps it complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.checks.mail_addresses import check_mail_address
from gateway.pricing import parse_usd

_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:\d+)?")
_ISSUER: Final = re.compile(r"https://.|http://(localhost|127\.0\.0\.1)(:|/|$)")
_GROUP_ROLE: Final = re.compile(r"operator|finance|auditor|account:.+:(owner|member|viewer)")

FOREVER: Final = "forever"
RETENTION_MIN: Final[Mapping[str, float]] = {
    "output_retention_hours": 0,
    "event_retention_minutes": 1,
    "upload_retention_hours": 0,
    "file_retention_days": 0,
    "metadata_retention_days": 1,
    "idempotency_retention_days": 0,
    "webhook_retention_days": 0,
    # Longer than a month, so that its budgets are not told twice.
    "notice_retention_days": 40,
    "audit_retention_days": 1,
    "batch_retention_days": 1,
    # Longer than a month, whose window it can be.
    "budget_window_retention_days": 62,
}
"""Settings of retention, with the least value of each; 0 is excluded."""
RETENTION_ENDLESS: Final = (
    "file_retention_days",
    "metadata_retention_days",
    "webhook_retention_days",
    "notice_retention_days",
    "audit_retention_days",
    "batch_retention_days",
    "budget_window_retention_days",
)
"""Settings that can be ``forever``."""
RETENTION_YEARS_MAX: Final = 100
_A_YEAR: Final = {"minutes": 525_600, "hours": 8760, "days": 365}

DATABASE_FILE: Final = "tollgate.db"
"""Name of the SQLite database in the home."""


class Settings(BaseSettings):
    """Read from the environment, with the prefix ``TOLLGATE_``, except for the URLs of services and
    Stripe's secrets."""

    model_config = SettingsConfigDict(
        env_prefix="TOLLGATE_", frozen=True, extra="ignore", populate_by_name=True
    )

    home: Path = Path(".tollgate")
    """State directory: database, blobs, logs, secrets."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port that the gateway listens on."""
    processes: int = Field(default=1, ge=1, le=256)
    """Gateway processes, which share the port. Limits of a gateway, such as `connections_max`,
    apply to each. More than one pays off on PostgreSQL with free cores."""
    catalog: Path = Path("catalog.yaml")
    """File of the models on sale and their prices."""
    public_catalog: bool = False
    """Whether the catalog, its picks and the list of models can be read without a key, at list
    prices."""
    public_catalog_per_minute: int = Field(default=60, ge=1)
    """Maximum calls without a key per minute from one address, and twenty times as many from all,
    in each gateway process."""
    cors_origins: str = ""
    """Origins whose pages may call the gateway, separated by commas, such as
    `https://chat.example.com`; `*` allows all. Without it, browsers block calls of all pages."""

    database_url: str | None = Field(
        default=None, validation_alias=AliasChoices("database_url", "DATABASE_URL")
    )
    """URL of the database, ``sqlite:///…`` or ``postgresql://…``; default: a SQLite file in the
    home."""
    database_prepare: bool = True
    """Whether connections to PostgreSQL keep prepared statements and session settings; turn this
    off behind PgBouncer in transaction mode."""
    redis_url: str | None = Field(
        default=None, validation_alias=AliasChoices("redis_url", "REDIS_URL")
    )
    """URL of the queue server, ``redis://``, ``rediss://`` or ``unix://``; without it ``up`` starts
    an embedded server."""
    blob_url: str | None = Field(
        default=None, validation_alias=AliasChoices("blob_url", "BLOB_URL")
    )
    """URL of the blob store, ``file:///…`` or ``s3://…``; default: a directory in the home."""

    output_row_bytes_max: int = Field(default=4096, ge=0)
    """Size of an output in bytes up to which it is a row in SQL; larger ones are blobs."""
    disk_reserve_bytes: int | None = Field(default=None, ge=0)
    """Free disk space below which nothing is stored for clients and the gateway is not ready;
    default: 512 MiB, but at most 5 % of the disk."""

    stripe_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("stripe_api_key", "STRIPE_API_KEY")
    )
    """Stripe's API key, which enables top-ups by card through Stripe Checkout."""
    stripe_webhook_secret: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("stripe_webhook_secret", "STRIPE_WEBHOOK_SECRET"),
    )
    """Signing secret of the endpoint `/webhooks/stripe`; required with the key."""
    stripe_api_base: str | None = None
    """Alternative base URL of Stripe's API, for tests and proxies."""
    topup_min_usd: str = "5"
    """Minimum amount of one payment."""
    topup_max_usd: str = "10000"
    """Maximum amount of one payment."""

    close_months: bool = True
    """Whether each month is closed and invoiced automatically in the night after its end."""
    issuer_name: str = "Tollgate"
    """Name of the issuer of statements; printed on them with the next two settings."""
    issuer_address: str = ""
    """Address of the issuer, lines separated by `;`."""
    issuer_note: str = ""
    """Further text on statements, such as a tax number."""

    metrics: Literal["key", "open", "off"] = "key"
    """Access to `/metrics`: `key` requires a key of the scope `admin` or the token below, `open`
    allows every caller, `off` none."""
    metrics_token: SecretStr | None = None
    """Bearer token for scrapers of `/metrics`; it grants no other access."""
    worker_environment: str = ""
    """Names, separated by commas, of further environment variables that `up` passes to its
    worker."""

    namespace: str = "gq"
    """Prefix of every Redis key, so that several installations can share one server."""
    pepper: SecretStr | None = None
    """Secret with which keys are hashed; default: a file in the home, created at first start."""

    gpu_hour_usd: str | None = None
    """Your cost of a device hour in USD, such as `2.50`, for devices not in `gpu_hours` of the
    catalog; administrators then see margins."""
    hold_slice_tokens: int = Field(default=2048, ge=1)
    """Output tokens per slice of an incremental hold, for each choice of a stream without a token
    limit."""
    connections_max: int = Field(default=10_000, ge=1)
    """Maximum open connections of one gateway; further ones are closed. Each needs a file
    descriptor."""
    header_timeout_s: float = Field(default=15.0, gt=0)
    """Time within which a new connection must begin a request; its headers have twice as long."""
    body_bytes_per_s_min: float = Field(default=1024.0, ge=0)
    """Rate below which a body counts as stalled, measured over the header timeout."""
    body_bytes_max: int = 16 * 1024 * 1024
    """Maximum size of a body without media."""
    media_body_bytes_max: int = Field(default=64 * 1024 * 1024, ge=1)
    """Maximum size of a body that can contain images, video or audio."""
    bodies_bytes_max: int = Field(default=2 * 1024**3, ge=1)
    """Maximum bytes of large bodies (above 256 KiB) in flight in one gateway; a single one always
    fits."""
    account_bodies_bytes_max: int = Field(default=512 * 1024 * 1024, ge=1)
    """Maximum bytes of large bodies of one account in flight in one gateway."""
    bodies_memory_bytes_max: int = Field(default=128 * 1024 * 1024, ge=1)
    """Maximum bytes of large bodies without files in flight in one gateway; they stay in memory
    while their request runs."""
    media_bytes_max: int = Field(default=50 * 1024 * 1024, ge=1)
    """Maximum size of one attached image, video or audio file, however it is sent."""
    fetch_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for fetching all URLs of one request."""
    fetch_private_addresses: bool = False
    """Whether URLs from clients may point to private networks and omit TLS; for tests."""
    media_url_minutes: float = Field(default=60.0, gt=0)
    """Validity of presigned URLs of outputs; reading the request again returns new ones."""
    public_url: str | None = None
    """Base URL at which clients reach the gateway; default: the one that they called."""
    account_voices_max: int = Field(default=100, ge=1)
    """Maximum stored voices of one account, and of its consents."""
    voice_bytes_max: int = Field(default=10 * 1024 * 1024, ge=1)
    """Maximum size of the recording of a stored voice or of a consent."""
    input_bytes_max: int = Field(default=8 * 1024 * 1024, ge=1, le=128 * 1024 * 1024)
    """Maximum size of one request's validated text input; large ones are stored until the request
    ends."""
    cancelled_seconds_per_hour: int | None = Field(default=None, ge=1)
    """Device seconds per hour that an account may cancel free of charge, unless it has a limit."""
    queue_max: int = 10_000
    """Maximum queued requests of one model."""
    account_queue_max: int = 1_000
    """Maximum queued requests of one account for one model."""
    account_concurrent: int = Field(default=2_000, ge=0)
    """Maximum requests of one account that are queued or running, unless it has a limit
    (`tollgate limit set`); 0 is unlimited. Batch lines are not counted."""
    key_concurrent: int = Field(default=1_000, ge=0)
    """Maximum requests of one key that are queued or running, unless it or its account has a
    limit."""
    wait_max_s: float = 60.0
    """Estimated queueing time above which waiting clients get 429."""
    async_wait_max_s: float = 900.0
    """Estimated queueing time above which ``POST /v1/requests`` returns 429."""
    timeout_s: float = 120.0
    """Deadline of a request whose client waits, unless the catalog entry sets one."""
    async_timeout_s: float = 900.0
    """Deadline of a request made through ``POST /v1/requests``."""
    retry_grace_s: float = 5.0
    """Time for which a request keeps running after its client has disconnected, so that the client
    can reconnect."""
    retry_window_s: float = 120.0
    """Time after a disconnect in which an identical request is treated as a retry of the first."""
    file_bytes_max: int = Field(default=200 * 1024 * 1024, ge=1)
    """Maximum size of an uploaded file."""
    account_files_max: int = Field(default=10_000, ge=0)
    """Maximum files of one account, including those of batches; an administrator can set another
    maximum for an account."""
    account_file_bytes_max: int = Field(default=20 * 1024**3, ge=0)
    """Maximum bytes of the files of one account, including recordings of voices."""
    batch_lines_max: int = Field(default=50_000, ge=1)
    """Maximum requests of one batch."""
    batch_window_s: float = Field(default=86_400.0, gt=0, le=6 * 86_400)
    """Completion window of a batch (`24h` in the API); requests that did not run by then expire."""
    batch_in_flight: int = Field(default=16, ge=1)
    """Maximum requests of one batch that are queued or running at a time."""
    account_batches_max: int = Field(default=100, ge=1)
    """Maximum batches of one account that have not ended."""
    batches_running: int = Field(default=4, ge=1)
    """Maximum batches that one gateway runs at a time; others wait."""
    batch_weight: float = Field(default=0.1, gt=0, le=1)
    """Weight of an account's batches in a model's queue, relative to its other requests (1)."""
    batch_lease_s: float = Field(default=15.0, ge=1)
    """Time after the crash of a gateway until another one continues its batches."""
    sweep_interval_s: float = 5.0
    """Time between two sweeps, which end overdue requests."""
    loop_failures_max: int = Field(default=8, ge=1)
    """Consecutive failures of one background loop (about 90 s) after which the gateway exits."""
    loop_silence_max_s: float = Field(default=60.0, ge=5)
    """Time without a completed round of one background loop after which the gateway is not live."""
    webhook_private_addresses: bool = False
    """Whether webhooks may be sent to private networks and without TLS; for tests and laptops.
    Accounts then see how services there answer."""
    # Retention: each kind is cleared by ``gateway.retention``. None (`forever`) keeps it.
    output_retention_hours: float = 24.0
    """Retention of outputs, and of the attachments of their requests."""
    event_retention_minutes: float = 15.0
    """Retention of the event logs of requests after their last event, in the queue server; workers
    read it as well."""
    upload_retention_hours: float = 24.0
    """Retention of uploads."""
    file_retention_days: float | None = 30.0
    """Retention of files that were uploaded without an expiry, and of files of batches."""
    metadata_retention_days: float | None = None
    """Retention of the metadata (tags) of requests and batches; receipts are kept."""
    idempotency_retention_days: float = 7.0
    """Retention of idempotency keys."""
    webhook_retention_days: float | None = 30.0
    """Retention of webhook deliveries and their attempts after they have ended."""
    notice_retention_days: float | None = 90.0
    """Retention of notices and their deliveries."""
    audit_retention_days: float | None = None
    """Retention of the audit log."""
    batch_retention_days: float | None = None
    """Retention of batches after their end; their requests and files have their own."""
    budget_window_retention_days: float | None = None
    """Retention of the sums of a budget's hours, days and months since their start."""
    notice_credit_low_usd: str | None = None
    """Credit, such as `5`, below which an account is told that it is nearly used up."""
    console: bool = True
    """Whether the console is served under `/console`."""
    console_key_login: bool = True
    """Whether a key opens the console; turn this off if people enter through a provider."""
    console_insecure: bool = False
    """Whether the console can be entered without TLS at an address that is not loopback; for tests
    in a trusted network."""
    console_spend_limit_usd: str = "5"
    """Spend limit of the key with which people order in the console, one for each account; its
    owner can change it."""
    console_idle_minutes: float = Field(default=30.0, ge=1)
    """Time without a request after which a session of an operator, finance or an auditor ends;
    those of members of accounts end after 12 hours."""
    console_session_hours: float = Field(default=12.0, ge=0.1)
    """Maximum length of such a session; that of members of accounts is 14 days."""
    oidc_issuer: str | None = None
    """Issuer of the provider of OpenID Connect through which people enter the console, such as
    `https://login.example.com`; needs the extra `oidc`."""
    oidc_client_id: str = ""
    """Client of the console at the provider, with the secret below."""
    oidc_client_secret: SecretStr | None = None
    """Secret of the client at the provider."""
    oidc_scopes: str = "openid email profile groups"
    """Scopes that are asked for."""
    oidc_groups: str = "groups"
    """Claim with the groups of a person."""
    oidc_roles: str = "{}"
    """Roles of groups, such as `{"ops": "operator", "devs": "account:acme:member"}`."""
    smtp_host: str | None = None
    """Mail server through which notices are sent."""
    smtp_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the mail server; default: 587, 465 or 25, by the next setting."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption of mail: `starttls` requires it after connecting, `tls` from the start."""
    smtp_user: str | None = None
    """User name at the mail server."""
    smtp_password: SecretStr | None = None
    """Password at the mail server."""
    mail_from: str | None = None
    """Address from which notices are sent."""
    shutdown_grace_s: float = 10.0
    """Time for which a stopping gateway waits for open connections."""
    log_level: str = "INFO"
    """Level of the log."""

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> Self:
        secret = self.stripe_webhook_secret
        if self.stripe_api_key is not None and not (secret and secret.get_secret_value()):
            raise ValueError(
                "STRIPE_API_KEY is set but STRIPE_WEBHOOK_SECRET is empty, so anyone could forge a "
                "payment event; set the signing secret of the endpoint /webhooks/stripe"
            )
        return self

    @model_validator(mode="after")
    def _batches_are_remembered(self) -> Self:
        if self.idempotency_retention_days * 86_400 < self.batch_window_s + 86_400:
            raise ValueError(
                f"TOLLGATE_IDEMPOTENCY_RETENTION_DAYS={self.idempotency_retention_days} is too "
                "short: idempotency keys must be kept for a day longer than "
                f"TOLLGATE_BATCH_WINDOW_S={self.batch_window_s}, or a line could run twice"
            )
        return self

    @model_validator(mode="after")
    def _mail_can_be_sent(self) -> Self:
        if (self.smtp_host is None) != (self.mail_from is None):
            raise ValueError("TOLLGATE_SMTP_HOST and TOLLGATE_MAIL_FROM must be set together")
        if (self.smtp_user is None) != (self.smtp_password is None):
            raise ValueError("TOLLGATE_SMTP_USER and TOLLGATE_SMTP_PASSWORD must be set together")
        if self.smtp_security == "none" and self.smtp_password is not None:
            raise ValueError(
                "TOLLGATE_SMTP_PASSWORD would be sent in the clear; set TOLLGATE_SMTP_SECURITY to "
                "starttls or tls"
            )
        return self

    @field_validator("mail_from")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        return value if value is None else check_mail_address(value)

    @field_validator(*RETENTION_MIN, mode="before")
    @classmethod
    def _is_retention(cls, value: Any, info: ValidationInfo) -> float | None:
        field = str(info.field_name)
        name, unit = f"TOLLGATE_{field.upper()}", field.rpartition("_")[2]
        endless = field in RETENTION_ENDLESS
        if endless and value in (None, FOREVER):
            return None
        if value == FOREVER:
            raise ValueError(f"{name} cannot be {FOREVER!r}; use a number of {unit}")
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        least, most = RETENTION_MIN[field], RETENTION_YEARS_MAX * _A_YEAR[unit]
        if not (number > 0 and least <= number <= most):
            range = f"from {least:g} to {most}" if least else f"above 0, at most {most}"
            other = f", or {FOREVER!r}" if endless else ""
            raise ValueError(f"{name}={value!r}; use a number of {unit} {range}{other}")
        return number

    @field_validator(
        "gpu_hour_usd",
        "topup_min_usd",
        "topup_max_usd",
        "notice_credit_low_usd",
        "console_spend_limit_usd",
    )
    @classmethod
    def _is_amount(cls, value: str | None) -> str | None:
        if value is not None:
            parse_usd(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in _split(value):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"TOLLGATE_CORS_ORIGINS names {origin!r}; an origin is a scheme and a host, "
                    "without a path: https://chat.example.com"
                )
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _is_issuer(cls, value: str | None) -> str | None:
        if value is not None and not _ISSUER.match(value):
            raise ValueError(f"TOLLGATE_OIDC_ISSUER={value!r}; it must begin with https://")
        return value

    @field_validator("oidc_roles")
    @classmethod
    def _are_roles(cls, value: str) -> str:
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError('TOLLGATE_OIDC_ROLES is not a JSON object such as {"ops": "operator"}')
        for group, role in found.items():
            if not isinstance(role, str) or not _GROUP_ROLE.fullmatch(role):
                raise ValueError(
                    f"TOLLGATE_OIDC_ROLES gives {group!r} the role {role!r}; use operator, "
                    "finance, auditor, or account:NAME: with owner, member or viewer"
                )
        return value

    @model_validator(mode="after")
    def _provider_is_complete(self) -> Self:
        if self.oidc_issuer is not None and not self.oidc_client_id:
            raise ValueError("TOLLGATE_OIDC_ISSUER is set without TOLLGATE_OIDC_CLIENT_ID")
        return self

    @property
    def oidc_role_map(self) -> Mapping[str, str]:
        found: dict[str, str] = json.loads(self.oidc_roles)
        return found

    @property
    def gpu_hour_nanos(self) -> int | None:
        return None if self.gpu_hour_usd is None else parse_usd(self.gpu_hour_usd)

    @property
    def notice_credit_low_nanos(self) -> int | None:
        low = self.notice_credit_low_usd
        return None if low is None else parse_usd(low)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return tuple(_split(self.cors_origins))

    @property
    def worker_variables(self) -> tuple[str, ...]:
        return tuple(_split(self.worker_environment))

    @property
    def queue_url(self) -> str:
        """Return the URL of the queue server. Raise ``ValueError`` if it is not set."""
        if self.redis_url is None:
            raise ValueError("REDIS_URL is not set; only `tollgate up` starts a queue server")
        return self.redis_url

    @property
    def console_url(self) -> str:
        """Return the URL by which a person reaches the gateway, without a slash at its end."""
        if self.public_url is not None:
            return self.public_url.rstrip("/")
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home.resolve() / DATABASE_FILE}"

    @property
    def sqlite_file(self) -> Path | None:
        """The file of the database, or None for a database server."""
        name = self.sql_url.partition("?")[0].removeprefix("sqlite:///")
        return None if name == self.sql_url.partition("?")[0] else Path(name)

    @property
    def blobs(self) -> str:
        return self.blob_url or f"file://{self.home.resolve() / 'blobs'}"


def in_days(days: float | None) -> timedelta | None:
    """Convert a retention; None is for ever."""
    return None if days is None else timedelta(days=days)


def _split(value: str) -> list[str]:
    return [item for part in value.split(",") if (item := part.strip())]
