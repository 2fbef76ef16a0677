"""OpenAI's files: inputs and outputs of batches, and attachments of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated, Final, Generic, Literal, TypedDict, TypeVar

from litestar import Controller, Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.enums import RequestEncodingType
from litestar.params import Body, FromPath, FromQuery
from litestar.response import Stream
from pydantic import ConfigDict, Field

from gateway.api.http.answers import DeletedView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.content_types import BYTES
from gateway.api.http.guards import may_store
from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import prepend
from gateway.api.http.uploading import read_file, size_of, store_upload
from gateway.checks.strict import StrictModel
from gateway.errors import InternalError, InvalidRequest, TollgateError, TooLarge, Unavailable
from gateway.files.store import File, SortOrder
from gateway.settings import Settings, in_days
from workers.contract.blobs import BlobError, BlobTooLarge, BlobUnavailable
from workers.contract.kinds import EXTENSIONS

PAGE_MAX: Final = 10_000
CHUNK_BYTES: Final = 1024 * 1024
KEPT_SECONDS: Final = (3_600, 30 * 86_400)
"""Minimum and maximum of OpenAI's ``expires_after``: an hour and thirty days."""
PURPOSES: Final = ("batch", "vision", "user_data")
OTHER_PURPOSES: Final = ("assistants", "fine-tune", "evals")

KeptSeconds = Annotated[int, Field(ge=KEPT_SECONDS[0], le=KEPT_SECONDS[1])]


class UploadedName(TypedDict):
    id: str


ItemView = TypeVar("ItemView", bound=UploadedName)


class OpenAIListView(TypedDict, Generic[ItemView]):
    """OpenAI's list: the last id is the cursor of the next page."""

    object: Literal["list"]
    data: list[ItemView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileView(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class Upload(StrictModel):
    """Form of ``POST /v1/files``."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: UploadFile
    purpose: str
    anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    seconds: Annotated[KeptSeconds | None, Field(alias="expires_after[seconds]")] = None


class FilesController(Controller):
    path = "/v1/files"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference", "stores_body": True},
        guards=[may_store],
        operation_id="CreateFile",
        summary="Upload a file of requests for a batch, or one that requests can refer to",
    )
    async def create(
        self,
        request: ApiRequest,
        data: Annotated[Upload, Body(media_type=RequestEncodingType.MULTI_PART)],
    ) -> Response[FileView]:
        settings = request.services.settings
        try:
            # Litestar read the form without the checks of ``ApiRequest``; this call runs them.
            await request.form()
            made = await store_file(
                request,
                request.key.account_id,
                data.file,
                purpose=data.purpose,
                kept_for=_kept_for(data, settings),
            )
        finally:
            await data.file.close()
        return json_response(file_view(made))

    @get(opt={"scope": "read"}, operation_id="ListFiles", summary="List files, newest first")
    async def index(
        self,
        request: ApiRequest,
        after: FromQuery[str | None] = None,
        limit: FromQuery[int] = PAGE_MAX,
        order: FromQuery[SortOrder] = "desc",
        purpose: FromQuery[str | None] = None,
    ) -> Response[OpenAIListView[FileView]]:
        check_limit(limit, PAGE_MAX)
        page = await request.services.files.list(
            request.key.account_id, limit=limit, after=after, order=order, purpose=purpose
        )
        return json_response(list_view([file_view(file) for file in page.items], more=page.more))

    @get(
        "/{file_id:str}",
        opt={"scope": "read"},
        operation_id="GetFile",
        summary="Get a file's details",
    )
    async def show(self, request: ApiRequest, file_id: FromPath[str]) -> Response[FileView]:
        return json_response(
            file_view(await request.services.files.find(request.key.account_id, file_id))
        )

    @get(
        "/{file_id:str}/content",
        opt={"scope": "read", "media": [BYTES]},
        operation_id="GetFileContent",
        summary="Download a file",
    )
    async def content(self, request: ApiRequest, file_id: FromPath[str]) -> Stream:
        file = await request.services.files.find(request.key.account_id, file_id)
        return await serve_file(request, file)

    @delete(
        "/{file_id:str}",
        status_code=200,
        opt={"scope": "inference", "errors": [409], "least": "owner"},
        operation_id="DeleteFile",
        summary="Delete a file that no running batch uses",
    )
    async def remove(self, request: ApiRequest, file_id: FromPath[str]) -> Response[DeletedView]:
        await request.services.files.delete(request.key.account_id, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


async def store_file(
    request: ApiRequest,
    account_id: int,
    sent: UploadFile,
    *,
    purpose: str,
    kept_for: timedelta | None,
) -> File:
    """Store a file of a form: lines for a batch, or an image, a video or audio. Raise
    ``TollgateError``."""
    _check_purpose(purpose)
    files, settings = request.services.files, request.services.settings
    try:
        if purpose == "batch":
            return await files.create(
                account_id,
                purpose="batch",
                filename=sent.filename,
                chunks=_chunks(sent, settings.file_bytes_max),
                kept_for=kept_for,
                size_max=await size_of(sent),
            )
        return await store_upload(
            files,
            account_id,
            read_file(sent),
            filename=sent.filename,
            bytes_max=settings.media_bytes_max,
            kept_for=kept_for,
            purpose=purpose,
            size_max=await size_of(sent),
        )
    except BlobError as error:
        raise _unreadable(error) from None


async def serve_file(request: ApiRequest, file: File) -> Stream:
    """Answer with a file, to be saved. Raise ``TollgateError``."""
    chunks = request.services.files.content(file)
    try:
        # Read before the response begins, so that a failure of the store gets its own status.
        first = await anext(chunks, b"")
    except BlobError as error:
        raise _unreadable(error) from None
    extension = EXTENSIONS.get(file.blob.content_type, "jsonl")
    return Stream(
        prepend(first, chunks),
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(file.blob.bytes),
            "Content-Disposition": f'attachment; filename="{file.id}.{extension}"',
        },
    )


def file_view(file: File) -> FileView:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.blob.bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": int(file.expires_at.timestamp()) if file.expires_at else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_view(items: list[ItemView], *, more: bool) -> OpenAIListView[ItemView]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


async def _chunks(file: UploadFile, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield a file's bytes. Raise ``InvalidRequest`` if it is empty, ``TooLarge`` if too long."""
    size = 0
    while chunk := await file.read(CHUNK_BYTES):
        size += len(chunk)
        if size > bytes_max:
            raise TooLarge(
                "file_too_large", f"A file can have at most {bytes_max} bytes.", param="file"
            )
        yield chunk
    if not size:
        raise InvalidRequest("empty_file", "The file is empty.", param="file")


def _kept_for(data: Upload, settings: Settings) -> timedelta | None:
    if (data.anchor is None) != (data.seconds is None):
        raise InvalidRequest(
            "missing_required_parameter",
            "expires_after needs both anchor and seconds.",
            param="expires_after",
        )
    if data.seconds is None:
        return in_days(settings.file_retention_days)
    return timedelta(seconds=data.seconds)


def _check_purpose(purpose: str) -> None:
    if purpose in OTHER_PURPOSES:
        raise InvalidRequest(
            "unsupported_purpose",
            f"The purpose {purpose!r} is not supported; accepted: {', '.join(PURPOSES)}.",
            param="purpose",
        )
    if purpose not in PURPOSES:
        raise InvalidRequest(
            "invalid_value",
            f"purpose is {purpose!r}; accepted: {', '.join(PURPOSES)}.",
            param="purpose",
        )


def _unreadable(error: BlobError) -> TollgateError:
    match error:
        case BlobUnavailable():
            return Unavailable(
                "files_unavailable", "The file store is unavailable.", retry_after_s=2
            )
        case BlobTooLarge():
            return TooLarge("file_too_large", "The file is too large to be stored.")
    return InternalError("file_damaged", "The stored file is damaged; the error was logged.")
