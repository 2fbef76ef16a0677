"""Takes in files that requests may name, from a form or as a body, within their bounds."""

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
    kept_for: timedelta,
    purpose: str = "user_data",
    kind: MediumKind | None = None,
    file_id: str | None = None,
    size_max: int,
) -> File:
    """Store what a request may name, if it is a picture, a video or a sound, or of these the one
    that it is to be. Raise ``TollgateError``."""
    refusal = TooLarge(
        "file_too_large", f"An upload may have at most {bytes_max} bytes.", param="file"
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
            "files_unavailable", "The store of files does not answer.", retry_after_s=2
        ) from None


async def read_file(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk


async def size_of(file: UploadFile) -> int:
    """Return the bytes of a file of a form, which has been received whole."""
    found: int = await asyncio.to_thread(file.file.seek, 0, os.SEEK_END)
    await file.seek(0)
    return found
