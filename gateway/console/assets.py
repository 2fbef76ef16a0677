"""Serves scripts and styles from memory, under names with the digest of their content."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import mimetypes
from typing import Any, Final

from litestar import Response, get
from litestar.params import FromPath

from gateway.errors import NotFound


@functools.cache
def read_asset(name: str) -> bytes:
    return importlib.resources.files("gateway.console").joinpath("assets", name).read_bytes()


@functools.cache
def asset(name: str) -> str:
    """Return the address of a file."""
    return f"/console/assets/{hashlib.sha256(read_asset(name)).hexdigest()[:16]}/{name}"


@get("/assets/{digest:str}/{name:str}", opt={"open": True}, sync_to_thread=False)
def serve_asset(digest: FromPath[str], name: FromPath[str]) -> Response[bytes]:
    try:
        known = asset(name)
    except (OSError, ValueError):
        known = ""
    if known != f"/console/assets/{digest}/{name}":
        raise NotFound("not_found", "This file does not exist.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(read_asset(name), media_type=kind, headers=headers)


HANDLERS: Final[list[Any]] = [serve_asset]
