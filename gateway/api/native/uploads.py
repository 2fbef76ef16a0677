"""Uploads: images, videos and audio sent ahead, to which requests can refer for some hours.

An upload is a file of ``/v1/files`` with the purpose ``user_data``; it is listed and deleted there.
It is sent with a key, or to a presigned URL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final, Literal, TypedDict

from litestar import Controller, Response, post, put
from litestar.datastructures import UploadFile
from litestar.params import FromPath, FromQuery

from gateway.api.http.answers import json_response
from gateway.api.http.guards import may_store
from gateway.api.http.request import ApiRequest
from gateway.api.http.uploading import read_file, size_of, store_upload
from gateway.checks.moments import timestamp
from gateway.errors import Forbidden, InvalidRequest
from gateway.files.store import File
from gateway.files.upload_urls import PATH


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
        summary="Upload an image, a video or audio",
        description="Send a form with one `file`, or the bytes as the body. Requests "
        'then refer to it as `{"upload": id}`.',
    )
    async def create(self, request: ApiRequest) -> Response[UploadView]:
        settings = request.services.settings
        filename, chunks, size_max = await _open_body(request, settings.media_bytes_max)
        made = await store_upload(
            request.services.files,
            request.key.account_id,
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
        summary="Upload a file to its presigned URL; needs no key",
        description="Send exactly the announced content type. Repeating the call returns the same "
        "upload; a different file is refused.",
    )
    async def fill(
        self,
        request: ApiRequest,
        name: FromPath[str],
        account: FromQuery[str | None] = None,
        expires: FromQuery[str | None] = None,
        signature: FromQuery[str | None] = None,
    ) -> Response[UploadView]:
        settings = request.services.settings
        upload = request.services.upload_urls.check(
            name, account=account, expires=expires, signature=signature
        )
        sent_as = request.headers.get("content-type", "")
        if sent_as != upload.content_type:
            raise Forbidden(
                "invalid_signature",
                f"This URL was signed for the content type {upload.content_type}; "
                f"{sent_as or 'none'} was sent.",
            )
        made = await store_upload(
            request.services.files,
            upload.account_id,
            request.stream(),
            filename=name,
            bytes_max=settings.media_bytes_max,
            kept_for=timedelta(hours=settings.upload_retention_hours),
            kind=upload.kind,
            file_id=upload.file_id,
            size_max=_announced_size(request, settings.media_bytes_max),
        )
        return json_response(upload_view(made))


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


FORM: Final = "multipart/form-data"


def _announced_size(request: ApiRequest, bytes_max: int) -> int:
    """Return the announced size in bytes of a body that is the file, at most ``bytes_max``."""
    length = request.content_length
    return bytes_max if length is None else min(length, bytes_max)


async def _open_body(request: ApiRequest, bytes_max: int) -> tuple[str, AsyncIterator[bytes], int]:
    """Return name, bytes and size of the file, sent in a form or as the body."""
    if request.content_type[0] != FORM:
        return "upload", request.stream(), _announced_size(request, bytes_max)
    form = await request.form()
    file = form.get("file")
    if not isinstance(file, UploadFile) or len(list(form.multi_items())) != 1:
        raise InvalidRequest(
            "missing_required_parameter",
            "Send a form with exactly one field, file, or the bytes as the body.",
            param="file",
        )
    return file.filename, read_file(file), await size_of(file)
