"""Outputs under presigned URLs, which need no key; whole or in part."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Response, get, head
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from gateway.api.http.content_types import MEDIA
from gateway.api.http.media_views import EXPIRED, unreadable
from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.errors import Gone
from gateway.files.download_urls import PATH, BlobLocation
from workers.contract.blobs import BlobError
from workers.contract.kinds import EXTENSIONS


class BlobsController(Controller):
    path = PATH
    tags = ["Requests"]
    security = [{}]

    @get(
        "/{name:path}",
        opt={"media": MEDIA, "answers": [206], "errors": [403, 404, 410, 416, 503]},
        operation_id="GetBlob",
        summary="Download an output from its presigned URL, whole or in part; needs no key",
    )
    async def show(
        self,
        request: ApiRequest,
        name: FromPath[str],
        expires: FromQuery[str | None] = None,
        signature: FromQuery[str | None] = None,
    ) -> Response[Any] | Stream:
        return await serve(request, await _signed(request, name, expires, signature))

    @head(
        "/{name:path}",
        opt={"errors": [403, 404, 410, 503]},
        operation_id="HeadBlob",
        summary="Get the headers of an output",
    )
    async def describe(
        self,
        request: ApiRequest,
        name: FromPath[str],
        expires: FromQuery[str | None] = None,
        signature: FromQuery[str | None] = None,
    ) -> Response[None]:
        found = await _signed(request, name, expires, signature)
        try:
            size = await request.services.blobs.size(found.key)
        except BlobError as error:
            raise unreadable(error) from None
        headers = found.headers(0, size, size)
        return _Described(None, media_type=found.content_type, headers=headers)


async def _signed(
    request: ApiRequest, name: str, expires: str | None, signature: str | None
) -> BlobResponse:
    """Check a presigned URL and find its blob. Raise ``TollgateError``."""
    place = request.services.links.check(name.lstrip("/"), expires=expires, signature=signature)
    owner = await request.services.media.owner(place.request_id)
    if owner is None:
        raise Gone("blob_expired", EXPIRED)
    return BlobResponse(place.key(owner), place.content_type, _filename(place))


class _Described(Response[None]):
    """A response with headers of any content type, but no content."""

    def render(self, content: Any, media_type: str, enc_hook: Any = None) -> bytes:
        return b""


def _filename(place: BlobLocation) -> str:
    extension = EXTENSIONS.get(place.content_type, "bin")
    return f"{place.request_id}-{place.number}.{extension}"
