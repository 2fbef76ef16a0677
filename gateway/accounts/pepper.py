"""The server's secret: API keys are hashed with it, and signing keys for webhooks derive from it.

It comes from ``TOLLGATE_PEPPER`` (required if several gateways share a database) or else from a
file in the home directory, created once and readable only by its owner. Without it the stored
hashes are useless.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from gateway.settings import Settings

BYTES_MIN = 16


def read_pepper(settings: Settings) -> bytes:
    """Read the secret, or create it. Raise ``ValueError`` if it is too short."""
    if settings.pepper is not None:
        pepper = settings.pepper.get_secret_value().encode()
        if len(pepper) < BYTES_MIN:
            raise ValueError(f"TOLLGATE_PEPPER needs at least {BYTES_MIN} characters")
        return pepper
    path = settings.home / "pepper"
    with contextlib.suppress(FileExistsError):
        _make(path)
    return path.read_bytes()


def _make(path: Path) -> None:
    """Create the file with a new secret atomically; raise ``FileExistsError`` if it exists."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError
    draft = path.with_name(f"pepper.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
