"""Stores uploaded files that requests can refer to, within their size limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta

from litestar.datastructures import UploadFile

from gateway.errors import TooLarge, Unavailable
from gateway.files.fetch import CHUNK_BYTES, identify, limit_bytes
from gateway.files.store import File, Files
from workers.contract.blobs import BlobError
from workers.contract.media import MediumKind


async def store_upload(
    files: Files,
    account_id: int,
    chunks: AsyncIterator[bytes],
    *,
    filename: str,
    bytes_max: int,
    kept_for: timedelta | None,
    purpose: str = "user_data",
    kind: MediumKind | None = None,
    file_id: str | None = None,
    size_max: int,
) -> File:
    """Store an image, a video or audio that requests can refer to.

    ``kind`` restricts it to one of the three. Raise ``TollgateError``.
    """
    refusal = TooLarge(
        "file_too_large", f"An upload can have at most {bytes_max} bytes.", param="file"
    )
    try:
        content_type, whole = await identify(limit_bytes(chunks, bytes_max, refusal), kind, "file")
        return await files.create(
            account_id,
            purpose="vision" if purpose == "vision" else "user_data",
            filename=filename,
            chunks=whole,
            kept_for=kept_for,
            content_type=content_type,
            file_id=file_id,
            size_max=min(size_max, bytes_max),
        )
    except BlobError:
        raise Unavailable(
            "files_unavailable", "The file store is unavailable.", retry_after_s=2
        ) from None


async def read_file(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk


async def size_of(file: UploadFile) -> int:
    """Return the size in bytes of a form's file, which has been received completely."""
    found: int = await asyncio.to_thread(file.file.seek, 0, os.SEEK_END)
    await file.seek(0)
    return found
