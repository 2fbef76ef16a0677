"""The worker's settings: command line over environment over default, read once at startup.

Every setting is listed with its default in ``docs/reference/settings.md``.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Final, Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.contract.queue import NAMESPACE

_UNITS: Final = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", re.IGNORECASE)
NAME_MAX: Final = 100


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
    worker_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=NAME_MAX)
    """Appears in outcomes and announcements, with a suffix that identifies the process."""
    device: str = "auto"
    """Devices of the engines: ``auto`` (every CUDA device, otherwise the CPU), ``cpu``, ``cuda``,
    ``cuda:1``, or a list such as ``cuda:0,cuda:1``; a catalog entry can choose among them."""
    allow_commands: bool = False
    """Whether servers that entries of the catalog name by ``upstream.command`` are started."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine process. None: the engines' libraries decide."""
    memory_budget: str | None = None
    """Maximum memory of the loaded models on each device, such as ``20GB`` or ``512MiB``. None:
    that of the device or, on a CPU, of the machine or its container, less 10 % and at least 1 GiB.
    """
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
    def budget_bytes(self) -> int | None:
        """Raise ``ValueError`` if ``memory_budget`` is not a size."""
        return None if self.memory_budget is None else read_size(self.memory_budget)

    @property
    def queue_url(self) -> str:
        """Raise ``ValueError`` if no queue server is configured."""
        if self.redis_url is None:
            raise ValueError("no queue server configured; use --redis-url or set REDIS_URL")
        return self.redis_url


def read_size(text: str) -> int:
    """Return a number of bytes, from text such as ``1.5GB`` or ``512MiB``."""
    found = _SIZE.fullmatch(text)
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if not size:
        raise ValueError(f"memory budget is {text!r}; a size such as 20GB or 512MiB is accepted")
    return size
