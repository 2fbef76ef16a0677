"""Pictures, videos and sounds that are sent ahead, to be named by requests for some hours.

An upload is a file like those of ``/v1/files`` of the purpose ``user_data``, and is listed and
deleted there. It comes with a key, or to an address that was signed for it alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict

from litestar import Controller, Request, Response, post, put
from litestar.datastructures import UploadFile
from litestar.params import FromPath, FromQuery

from gateway.api.http.access import caller
from gateway.api.http.answers import json_response
from gateway.api.http.storing import may_store
from gateway.api.native.views import timestamp
from gateway.errors import Forbidden, InvalidRequest, TooLarge, Unavailable
from gateway.files.fetch import CHUNK_BYTES, identified
from gateway.files.store import File, Files
from gateway.files.upload_urls import PATH, Slots
from gateway.settings import Settings
from workers.contract.blobs import BlobError
from workers.contract.media import MediumKind


class UploadView(TypedDict):
    id: str
    object: Literal["upload"]
    bytes: int
    content_type: str
    sha256: str
    created_at: str
    expires_at: str | None


class UploadsController(Controller):
    path = PATH
    tags = ["Requests"]
    opt = {"scope": "inference"}

    @post(
        status_code=201,
        opt={"stores_body": True},
        guards=[may_store],
        operation_id="CreateUpload",
        summary="Send a picture, a video or a sound ahead",
        description="Either a form with one `file`, or the bytes themselves as the body. A request "
        'then names it as `{"upload": id}`.',
    )
    async def create(self, request: Request[Any, Any, Any]) -> Response[UploadView]:
        settings: Settings = request.app.state.settings
        files: Files = request.app.state.files
        filename, chunks, size_max = await _opened(request, settings.media_bytes_max)
        made = await store_upload(
            files,
            caller(request).account_id,
            chunks,
            filename=filename,
            bytes_max=settings.media_bytes_max,
            kept_for=timedelta(hours=settings.upload_retention_hours),
            size_max=size_max,
        )
        return json_response(upload_view(made), status=201)

    @put(
        "/{name:str}",
        status_code=200,
        opt={"scope": None, "errors": [403, 404, 409, 410, 413, 429, 503]},
        security=[{}],
        operation_id="FillUpload",
        summary="Send a file to the address that was signed for it; no key is needed",
        description="With exactly the content type that was announced. Sent again it is the same "
        "upload; another file in its place is refused.",
    )
    async def fill(
        self,
        request: Request[Any, Any, Any],
        name: FromPath[str],
        account: FromQuery[str | None] = None,
        expires: FromQuery[str | None] = None,
        signature: FromQuery[str | None] = None,
    ) -> Response[UploadView]:
        settings: Settings = request.app.state.settings
        slots: Slots = request.app.state.slots
        slot = slots.check(name, account=account, expires=expires, signature=signature)
        sent_as = request.headers.get("content-type", "")
        if sent_as != slot.content_type:
            raise Forbidden(
                "invalid_signature",
                f"This address was signed for the content type {slot.content_type}, "
                f"but {sent_as or 'none'} was sent.",
            )
        made = await store_upload(
            request.app.state.files,
            slot.account_id,
            request.stream(),
            filename=name,
            bytes_max=settings.media_bytes_max,
            kept_for=timedelta(hours=settings.upload_retention_hours),
            kind=slot.kind,
            file_id=slot.file_id,
            size_max=_announced(request, settings.media_bytes_max),
        )
        return json_response(upload_view(made))


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
    try:
        content_type, whole = await identified(_bounded(chunks, bytes_max), kind, "file")
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


def upload_view(file: File) -> UploadView:
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


async def size_of(file: UploadFile) -> int:
    """Return the bytes of a file of a form, which has been received whole."""
    found: int = await asyncio.to_thread(file.file.seek, 0, os.SEEK_END)
    await file.seek(0)
    return found


def _announced(request: Request[Any, Any, Any], bytes_max: int) -> int:
    """Return the bytes of a body that is the file itself, at most ``bytes_max``."""
    length = request.content_length
    return bytes_max if length is None else min(length, bytes_max)


async def _opened(
    request: Request[Any, Any, Any], bytes_max: int
) -> tuple[str, AsyncIterator[bytes], int]:
    """The name, the bytes and the size of what is sent, however it is."""
    if request.content_type[0] != FORM:
        return "upload", request.stream(), _announced(request, bytes_max)
    form = await request.form()
    file = form.get("file")
    if not isinstance(file, UploadFile) or len(list(form.multi_items())) != 1:
        raise InvalidRequest(
            "missing_required_parameter",
            "Send a form with one file, called file, or the bytes themselves.",
            param="file",
        )
    return file.filename, read_file(file), await size_of(file)


async def _bounded(chunks: AsyncIterator[bytes], bytes_max: int) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > bytes_max:
            raise TooLarge(
                "file_too_large", f"An upload may have at most {bytes_max} bytes.", param="file"
            )
        yield chunk
