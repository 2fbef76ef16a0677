"""Serves the gateway at an address, within this process."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any, Self

import uvicorn

from gateway.app import create_app
from gateway.server.single import Server
from gateway.settings import Settings
from tests.stack import PEPPER, free_port


def served_settings(directory: Path, url: str, queue: str, **more: Any) -> Settings:
    """Return the settings of a gateway at a free port, whose catalog is in ``directory``."""
    return Settings.model_validate(
        {
            "home": directory / "home",
            "catalog": directory / "catalog.yaml",
            "database_url": url,
            "redis_url": queue,
            "namespace": f"t{uuid.uuid4().hex[:8]}",
            "pepper": PEPPER,
            "port": free_port(),
            **more,
        }
    )


class serving:  # lower case, like other context managers
    """Serves the gateway in a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        Path(settings.home).mkdir(parents=True, exist_ok=True)
        self.app = create_app(settings)
        config = uvicorn.Config(self.app, port=settings.port, log_level="warning")
        self._server = Server(config, self.app)
        self._thread = threading.Thread(target=self._server.run, name="console")

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway ended"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
