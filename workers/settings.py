"""The worker's settings: command line over environment over default, read once at start.

Every setting is listed with its default in ``docs/settings.md``.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.contract.queue import NAMESPACE


class WorkerSettings(BaseSettings):
    """Read from the environment, with the prefix ``TOLLGATE_`` but for the service addresses."""

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
    """``file:///…`` or ``s3://…``, the same as the gateway's; files of requests need it."""
    namespace: str = NAMESPACE
    """Prefix of every Redis key, the same as the gateway's."""
    worker_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=100)
    """Shown in outcomes and announcements, with a few digits that name the process."""
    device: str = "cpu"
    """Of all models but those whose catalog entry names its own: ``cpu``, ``cuda:0``."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine process; without it the engines' libraries decide."""
    preload: bool = True
    """Load weights at the start, not at the first request."""
    account_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a model's running jobs that one account keeps while another one waits; 1 is no
    bound. An account that is alone gets every place."""
    drain_s: float = Field(default=30.0, ge=0.0)
    """How long running jobs may take to end after SIGTERM; the rest is given back."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @property
    def queue_url(self) -> str:
        """Raise ``ValueError`` where no queue server is named."""
        if self.redis_url is None:
            raise ValueError("no queue server is named: give --redis-url or set REDIS_URL")
        return self.redis_url
