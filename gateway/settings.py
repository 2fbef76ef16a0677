"""The gateway's settings: environment variables → one frozen object, read once at start.

Every setting is listed with its default in ``docs/reference/settings.md``; a test keeps that page complete.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.pricing import parse_usd

_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:\d+)?")


class Settings(BaseSettings):
    """Read from the environment, prefixed ``TOLLGATE_`` but for the three service addresses."""

    model_config = SettingsConfigDict(
        env_prefix="TOLLGATE_", frozen=True, extra="ignore", populate_by_name=True
    )

    home: Path = Path(".tollgate")
    """State directory: database, queue, blobs, secrets."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    catalog: Path = Path("catalog.yaml")
    cors_origins: str = ""
    """Origins whose pages may call the gateway, separated by commas, such as
    `https://chat.example.com`; `*` is every page. Without it, browsers refuse all pages."""

    database_url: str | None = Field(
        default=None, validation_alias=AliasChoices("database_url", "DATABASE_URL")
    )
    """``sqlite:///…`` or ``postgresql://…``; without it a SQLite file in the home."""
    database_prepare: bool = True
    """Whether PostgreSQL may keep prepared statements and settings on a connection; off behind
    PgBouncer in transaction mode."""
    redis_url: str | None = Field(
        default=None, validation_alias=AliasChoices("redis_url", "REDIS_URL")
    )
    """``redis://``, ``rediss://`` or ``unix://``; without it ``up`` starts an embedded server."""
    blob_url: str | None = Field(
        default=None, validation_alias=AliasChoices("blob_url", "BLOB_URL")
    )
    """``file:///…`` or ``s3://…``; without it a directory in the home."""

    disk_reserve_bytes: int | None = Field(default=None, ge=0)
    """Free disk space below which nothing is stored for clients and the gateway is not ready;
    without it 512 MiB, but at most 5 % of the disk."""

    stripe_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("stripe_api_key", "STRIPE_API_KEY")
    )
    """Lets accounts top up by card through Stripe Checkout."""
    stripe_webhook_secret: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("stripe_webhook_secret", "STRIPE_WEBHOOK_SECRET"),
    )
    """Signing secret of the endpoint `/webhooks/stripe`; needed beside the key."""
    stripe_api_base: str | None = None
    """Another address of Stripe's API, for tests and proxies."""
    topup_min_usd: str = "5"
    topup_max_usd: str = "10000"
    """Bounds of one payment."""

    close_months: bool = True
    """Whether each month is closed and invoiced by itself in the night after its end."""
    issuer_name: str = "Tollgate"
    """Who issues statements; printed on them with the next two."""
    issuer_address: str = ""
    """Its address, lines separated by `;`."""
    issuer_note: str = ""
    """What else statements must say, such as a tax number."""

    metrics: Literal["key", "open", "off"] = "key"
    """Access to `/metrics`: with a key of the scope `admin` or the token below; `open` for every
    caller; or not at all."""
    metrics_token: SecretStr | None = None
    """Bearer token for scrapers of `/metrics`; it opens nothing else."""
    worker_environment: str = ""
    """Names, separated by commas, of further variables that `up` hands to its worker."""

    namespace: str = "gq"
    """Prefix of every Redis key, so that several installations can share one server."""
    pepper: SecretStr | None = None
    """Secret under which keys are hashed; without it a file in the home, made at first start."""

    gpu_hour_usd: str | None = None
    """What a device costs you in an hour, such as `2.50`; administrators then see margins."""
    hold_slice_tokens: int = Field(default=2048, ge=1)
    """Output tokens held for at a time, of each answer of a stream that names no length."""
    connections_max: int = Field(default=10_000, ge=1)
    """Open connections of one gateway; one more is closed. Each needs a file descriptor."""
    header_timeout_s: float = Field(default=15.0, gt=0)
    """Time in which a new connection must begin a request, and twice that for its headers."""
    body_bytes_per_s_min: float = Field(default=1024.0, ge=0)
    """Rate below which a body counts as stalled, measured over the time for headers."""
    body_bytes_max: int = 16 * 1024 * 1024
    media_body_bytes_max: int = Field(default=64 * 1024 * 1024, ge=1)
    """Of a body that may bring pictures, videos or sound along."""
    bodies_bytes_max: int = Field(default=2 * 1024**3, ge=1)
    """Bytes of large bodies (above 256 KiB) in flight in one gateway; a single one always fits."""
    account_bodies_bytes_max: int = Field(default=512 * 1024 * 1024, ge=1)
    """The same for one account."""
    bodies_memory_bytes_max: int = Field(default=128 * 1024 * 1024, ge=1)
    """The same for bodies without files, which stay in memory while their request runs."""
    media_bytes_max: int = Field(default=50 * 1024 * 1024, ge=1)
    """Of one picture, video or sound that is sent along, in whichever way."""
    fetch_timeout_s: float = Field(default=30.0, gt=0)
    """For everything that one request names by its address."""
    fetch_private_addresses: bool = False
    """Whether clients may name addresses in private networks and without TLS; for tests."""
    media_url_minutes: float = Field(default=60.0, gt=0)
    """How long an address of an output works; asking for the request again gives a fresh one."""
    public_url: str | None = None
    """Address at which clients reach the gateway; without it, the one that they called."""
    upload_retention_hours: float = Field(default=24.0, gt=0)
    """How long an upload can be used."""
    account_voices_max: int = Field(default=100, ge=1)
    """Voices that one account keeps, and as many consents."""
    voice_bytes_max: int = Field(default=10 * 1024 * 1024, ge=1)
    """Of the recording of a voice that is kept, or of a consent."""
    input_bytes_max: int = Field(default=8 * 1024 * 1024, ge=1, le=128 * 1024 * 1024)
    """Of one request's checked input of text; a large one is stored until the request ends."""
    cancelled_seconds_per_hour: int | None = Field(default=None, ge=1)
    """Device seconds that an account may cancel per hour for nothing, if it has no limit itself."""
    queue_max: int = 10_000
    """Queued requests of one model."""
    account_queue_max: int = 1_000
    """Queued requests of one account for one model."""
    account_concurrent: int = Field(default=2_000, ge=0)
    """Requests of one account that are queued or run concurrently, if it has no limit set
    (`tollgate limit set`); 0 is no bound. Batch lines are not counted."""
    key_concurrent: int = Field(default=1_000, ge=0)
    """The same for one key, if neither the key nor its account has a limit set."""
    wait_max_s: float = 60.0
    """Estimated queueing time beyond which a waiting client is sent away with 429."""
    async_wait_max_s: float = 900.0
    """The same for ``POST /v1/requests``."""
    timeout_s: float = 120.0
    """Deadline of a request whose client waits, where the catalog entry names none."""
    async_timeout_s: float = 900.0
    """Deadline of a request made through ``POST /v1/requests``."""
    retry_grace_s: float = 5.0
    """How long a request whose client has gone runs on, for the client to come back for it."""
    retry_window_s: float = 120.0
    """How long after its connection broke the same order again is the same request."""
    output_retention_hours: float = 24.0
    """How long an output can be fetched again."""
    idempotency_retention_days: float = 7.0
    file_bytes_max: int = Field(default=200 * 1024 * 1024, ge=1)
    """Of an uploaded file."""
    account_files_max: int = Field(default=10_000, ge=0)
    """Files that one account keeps, batches' included; an administrator can set another number
    for an account."""
    account_file_bytes_max: int = Field(default=20 * 1024**3, ge=0)
    """The same in bytes, recordings of voices included."""
    file_retention_days: float = Field(default=30.0, gt=0)
    """How long files are kept whose owner does not say."""
    batch_lines_max: int = Field(default=50_000, ge=1)
    """Requests of one batch."""
    batch_window_s: float = Field(default=86_400.0, gt=0, le=6 * 86_400)
    """How long a batch may take (`24h` in the API); what has not run by then has expired."""
    batch_in_flight: int = Field(default=16, ge=1)
    """Requests of one batch that are queued or running at a time."""
    account_batches_max: int = Field(default=100, ge=1)
    """Batches of one account that have not ended."""
    batches_running: int = Field(default=4, ge=1)
    """Batches that one gateway runs at a time; the others wait."""
    batch_weight: float = Field(default=0.1, gt=0, le=1)
    """Share of an account's batches in a model's queue beside an account's other requests (1)."""
    batch_lease_s: float = Field(default=15.0, ge=1)
    """How long after a gateway was lost another one goes on with its batches."""
    sweep_interval_s: float = 5.0
    loop_failures_max: int = Field(default=8, ge=1)
    """Failures in a row of one background loop (about 90 s) after which the gateway ends itself."""
    loop_silence_max_s: float = Field(default=60.0, ge=5)
    """Time without a completed round of one background loop after which the gateway is not live."""
    webhook_private_addresses: bool = False
    """Whether webhooks may go to private networks and without TLS; for tests and laptops."""
    webhook_retention_days: float = Field(default=30.0, gt=0)
    """Retention of webhook deliveries and their attempts after they have ended."""
    shutdown_grace_s: float = 10.0
    """How long a stopping gateway waits for open connections."""
    log_level: str = "INFO"

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> Self:
        secret = self.stripe_webhook_secret
        if self.stripe_api_key is not None and not (secret and secret.get_secret_value()):
            raise ValueError(
                "STRIPE_API_KEY is set but STRIPE_WEBHOOK_SECRET is empty: anybody could report a "
                "payment; set the signing secret of the endpoint /webhooks/stripe"
            )
        return self

    @model_validator(mode="after")
    def _batches_are_remembered(self) -> Self:
        if self.idempotency_retention_days * 86_400 < self.batch_window_s + 86_400:
            raise ValueError(
                f"TOLLGATE_IDEMPOTENCY_RETENTION_DAYS={self.idempotency_retention_days} is too "
                "short: names of orders must be kept for a day longer than "
                f"TOLLGATE_BATCH_WINDOW_S={self.batch_window_s}, or a line could be run twice"
            )
        return self

    @field_validator("gpu_hour_usd", "topup_min_usd", "topup_max_usd")
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

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return tuple(_split(self.cors_origins))

    @property
    def worker_variables(self) -> tuple[str, ...]:
        return tuple(_split(self.worker_environment))

    @property
    def queue_url(self) -> str:
        """Raise ``ValueError`` where no queue server is named; only ``up`` brings its own."""
        if self.redis_url is None:
            raise ValueError("REDIS_URL is not set; `tollgate up` starts a queue server of its own")
        return self.redis_url

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home.resolve() / 'tollgate.db'}"

    @property
    def blobs(self) -> str:
        return self.blob_url or f"file://{self.home.resolve() / 'blobs'}"


def _split(value: str) -> list[str]:
    return [item for part in value.split(",") if (item := part.strip())]
