"""The files that were sent with a request, for those who may see what was said."""

from __future__ import annotations

from typing import Any, Final

from litestar import Controller, Response, get
from litestar.params import FromPath
from litestar.response import Stream

from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.console.guards import needs
from gateway.console.visitors import CurrentVisitor
from gateway.errors import NotFound
from gateway.files.kept_inputs import kept_input
from workers.contract.kinds import EXTENSIONS


class InputFiles(Controller):
    path = "/requests/{request_id:str}/attachments"

    @get("/{position:int}", guards=[needs("requests.read")])
    async def show(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        request_id: FromPath[str],
        position: FromPath[int],
    ) -> Response[Any] | Stream:
        services = request.services
        owner_id = await services.media.owner(request_id)
        if owner_id is None or not visitor.may("contents.read", owner_id):
            raise NotFound("not_found", "There is no such file.")
        kept = await kept_input(services.media, owner_id, request_id)
        if kept is None or not 0 <= position < len(kept.attachments):
            raise NotFound("not_found", "There is no such file.")
        blob = kept.attachments[position]
        name = f"{request_id}-sent-{position}.{EXTENSIONS.get(blob.content_type, 'bin')}"
        answer = await serve(request, BlobResponse(blob.key, blob.content_type, name))
        answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return answer


HANDLERS: Final[list[Any]] = [InputFiles]
