"""Pictures, videos and sounds that are sent ahead, to be named by requests for some hours.

An upload is a file like those of ``/v1/files`` of the purpose ``user_data``, and is listed and
deleted there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

from litestar import Controller, Request, Response, post
from litestar.datastructures import UploadFile

from gateway.api.access import caller
from gateway.api.answers import json_response
from gateway.api.views import timestamp
from gateway.batches.files import File, Files
from gateway.errors import InvalidRequest, TooLarge, Unavailable
from gateway.media.fetch import CHUNK_BYTES, identified
from gateway.settings import Settings
from workers.contract.blobs import BlobError


class UploadsController(Controller):
    path = "/v1/uploads"
    tags = ["Requests"]
    opt = {"scope": "inference"}

    @post(
        status_code=201,
        operation_id="CreateUpload",
        summary="Send a picture, a video or a sound ahead",
        description="Either a form with one `file`, or the bytes themselves as the body. A request "
        'then names it as `{"upload": id}`.',
    )
    async def create(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        settings: Settings = request.app.state.settings
        files: Files = request.app.state.files
        filename, chunks = await _opened(request)
        made = await store_upload(
            files,
            caller(request).account_id,
            chunks,
            filename=filename,
            bytes_max=settings.media_bytes_max,
            kept_for=timedelta(hours=settings.upload_retention_hours),
        )
        return json_response(upload_view(made), status=201)


async def store_upload(
    files: Files,
    account_id: int,
    chunks: AsyncIterator[bytes],
    *,
    filename: str,
    bytes_max: int,
    kept_for: timedelta,
    purpose: str = "user_data",
) -> File:
    """Store what a request may name, if it is a picture, a video or a sound. Raise
    ``TollgateError``."""
    try:
        content_type, whole = await identified(_bounded(chunks, bytes_max), None, "file")
        return await files.create(
            account_id,
            purpose="vision" if purpose == "vision" else "user_data",
            filename=filename,
            chunks=whole,
            kept_for=kept_for,
            content_type=content_type,
        )
    except BlobError:
        raise Unavailable(
            "files_unavailable", "The store of files does not answer.", retry_after_s=2
        ) from None


def upload_view(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "upload",
        "bytes": file.blob.bytes,
        "content_type": file.blob.content_type,
        "sha256": file.blob.sha256,
        "created_at": timestamp(file.created_at),
        "expires_at": timestamp(file.expires_at) if file.expires_at else None,
    }


async def read_file(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk


FORM: Final = "multipart/form-data"


async def _opened(request: Request[Any, Any, Any]) -> tuple[str, AsyncIterator[bytes]]:
    """The name and the bytes of what is sent, however it is."""
    if request.content_type[0] != FORM:
        return "upload", request.stream()
    form = await request.form()
    file = form.get("file")
    if not isinstance(file, UploadFile) or len(list(form.multi_items())) != 1:
        raise InvalidRequest(
            "missing_required_parameter",
            "Send a form with one file, called file, or the bytes themselves.",
            param="file",
        )
    return file.filename, read_file(file)


async def _bounded(chunks: AsyncIterator[bytes], bytes_max: int) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > bytes_max:
            raise TooLarge(
                "file_too_large", f"An upload may have at most {bytes_max} bytes.", param="file"
            )
        yield chunk
