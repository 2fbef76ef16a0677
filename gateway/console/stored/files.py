"""Files of an account: what is there, until when, and which batch uses it. Upload, save, delete."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.datastructures import UploadFile
from litestar.params import FromPath
from litestar.response import Stream

from gateway.accounts.accounts import Account
from gateway.api.http.request import ApiRequest
from gateway.api.openai.files import PURPOSES, serve_file, store_file
from gateway.batches.file_users import batches_of_files
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import ROWS, FormValues, Query, problems_of
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError
from gateway.files.store import PURPOSES as ALL_PURPOSES
from gateway.files.store import File
from gateway.settings import in_days

WORDS: Final[Mapping[str, str]] = {
    "batch": "lines of a batch",
    "batch_output": "results of a batch",
    "vision": "picture, video or sound",
    "user_data": "picture, video or sound",
}
CHOICES: Final = (("batch", "a batch: one request a line"), ("user_data", "requests that read it"))
LISTS: Final = (
    ListColumns(
        "files",
        {
            "what": "For",
            "size": "Size",
            "sha256": "SHA-256",
            "stored": "Stored",
            "until": "Kept until",
            "users": "Used by",
        },
    ),
)


class FilePages(Controller):
    path = "/files"

    @get(guards=[needs("files.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _files_page(request, visitor)

    @get("/{file_id:str}/content", guards=[needs("files.read")])
    async def content(
        self, request: ApiRequest, visitor: CurrentVisitor, file_id: FromPath[str]
    ) -> Stream:
        account = await chosen_account(request, visitor)
        return await serve_file(request, await request.services.files.find(account.id, file_id))

    @post("/{file_id:str}/delete", guards=[needs("files.delete")])
    async def remove(
        self, request: ApiRequest, visitor: CurrentVisitor, file_id: FromPath[str]
    ) -> Response[Any]:
        account = await chosen_account(request, visitor)
        try:
            await request.services.files.delete(account.id, file_id)
        except TollgateError as error:
            return await _files_page(request, visitor, error=error, file_id=file_id)
        return see_other("/console/files")


class FileUploads(Controller):
    """Routes whose bodies have the size of a file."""

    path = "/files"

    @post(guards=[needs("files.write")])
    async def upload(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = FormValues(await request.form())
        try:
            purpose = form.text("purpose") or ""
            await upload_file(request, visitor, purpose if purpose in PURPOSES else "user_data")
        except TollgateError as error:
            return await _files_page(request, visitor, form, error=error)
        return see_other("/console/files")


async def chosen_account(request: ApiRequest, visitor: Visitor) -> Account:
    return await request.services.database.read(
        lambda connection: one_account(connection, visitor, None)
    )


async def upload_file(request: ApiRequest, visitor: Visitor, purpose: str) -> File:
    """Store the file of a form. Raise ``TollgateError``."""
    services, account = request.services, await chosen_account(request, visitor)
    sent = (await request.form()).get("file")
    if not isinstance(sent, UploadFile) or not sent.filename:
        raise InvalidRequest("missing_required_parameter", "Choose a file.", param="file")
    await services.room.check(account.id, size=int(request.headers.get("content-length", "0")))
    kept_for: timedelta | None = in_days(services.settings.file_retention_days)
    return await store_file(request, account.id, sent, purpose=purpose, kept_for=kept_for)


async def _files_page(
    request: ApiRequest,
    visitor: Visitor,
    form: FormValues | None = None,
    *,
    error: TollgateError | None = None,
    file_id: str | None = None,
) -> Response[str]:
    query, account = Query(request), await chosen_account(request, visitor)
    purpose = query.one_of("purpose", ALL_PURPOSES)
    found = await request.services.files.list(
        account.id, limit=ROWS, after=query.text("cursor"), purpose=purpose
    )
    ids = [each.id for each in found.items]
    users = await request.services.database.read(
        lambda connection: batches_of_files(connection, account.id, ids)
    )
    used_by = next((id for id, ended in users.get(file_id or "", ()) if not ended), None)
    return await page(
        request,
        visitor,
        "stored/files.html",
        lists=LISTS,
        title=f"Files of {account.name}",
        status=error.http_status if error else 200,
        account=account,
        rows=found.items,
        users=users,
        words=WORDS,
        purposes=[(each, WORDS[each]) for each in ("batch", "batch_output", "user_data", "vision")],
        choices=CHOICES,
        filters=query.values,
        narrowed=purpose is not None,
        values=form.values() if form else {},
        problems=problems_of(error),
        mistake=error.message if error else None,
        used_by=used_by,
        bytes_max=request.services.settings.file_bytes_max,
        pager=query.pages(ids[-1] if found.more else None),
    )


HANDLERS: Final[list[Any]] = [FilePages]
UPLOADS: Final[list[Any]] = [FileUploads]
