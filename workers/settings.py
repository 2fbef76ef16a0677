"""The worker's settings: command line over environment over default, read once at startup.

Every setting is listed with its default in ``docs/reference/settings.md``.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.contract.queue import NAMESPACE


class WorkerSettings(BaseSettings):
    """Read from the environment, with the prefix ``TOLLGATE_`` except for the service URLs."""

    model_config = SettingsConfigDict(
        env_prefix="TOLLGATE_", frozen=True, extra="ignore", populate_by_name=True
    )

    catalog: Path = Path("catalog.yaml")
    redis_url: str | None = Field(
        default=None, validation_alias=AliasChoices("redis_url", "REDIS_URL")
    )
    """``redis://``, ``rediss://`` or ``unix://``."""
    blob_url: str | None = Field(
        default=None, validation_alias=AliasChoices("blob_url", "BLOB_URL")
    )
    """``file:///…`` or ``s3://…``, the same as the gateway's; required for requests with files."""
    namespace: str = NAMESPACE
    """Prefix of every Redis key, the same as the gateway's."""
    worker_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=100)
    """Appears in outcomes and announcements, with a suffix that identifies the process."""
    device: str = "cpu"
    """Default device, such as ``cpu`` or ``cuda:0``; a catalog entry can name another one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine process. None: the engines' libraries decide."""
    preload: bool = True
    """Whether weights are loaded at startup instead of at the first request."""
    account_share: float = Field(default=0.5, gt=0, le=1)
    """Maximum share of a model's running jobs for one account while another one waits; 1 is
    unlimited. An account that is alone can use every slot."""
    drain_s: float = Field(default=30.0, ge=0.0)
    """Time in which running jobs can finish after SIGTERM; the others are requeued."""
    event_retention_minutes: float = Field(default=15.0, ge=1, le=52_560_000)
    """Retention of event logs after the last event, the same as the gateway's."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def queue_url(self) -> str:
        """Raise ``ValueError`` if no queue server is configured."""
        if self.redis_url is None:
            raise ValueError("no queue server configured; use --redis-url or set REDIS_URL")
        return self.redis_url
