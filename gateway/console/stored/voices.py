"""Voices of an account with the consents of their speakers: listen, rename, delete."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Literal, TypeAlias

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Stream

from gateway.api.http.request import ApiRequest
from gateway.api.http.serving import BlobResponse, serve
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import ROWS, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.stored.files import chosen_account
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import TollgateError
from workers.contract.kinds import EXTENSIONS

Recorded: TypeAlias = Literal["voice", "consent"]
CONSENTS_MAX: Final = 1_000
LISTS: Final = (
    ListColumns(
        "voices",
        {
            "recording": "Recording",
            "consent": "Consent",
            "description": "Description",
            "stored": "Stored",
        },
    ),
    ListColumns(
        "consents",
        {
            "recording": "Recording",
            "language": "Language",
            "voices": "Voices",
            "given": "Given",
        },
    ),
)


class StoredVoicePages(Controller):
    path = "/voices"

    @get(guards=[needs("voices.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _voices_page(request, visitor)

    @get("/{id:str}/recording", guards=[needs("voices.read")])
    async def recording(
        self, request: ApiRequest, visitor: CurrentVisitor, id: FromPath[str]
    ) -> Response[Any] | Stream:
        account = await chosen_account(request, visitor)
        found = await request.services.voices.find(account.id, _kind(id), id)
        extension = EXTENSIONS.get(found.blob.content_type, "bin")
        name = f"{id}.{extension}"
        answer = await serve(request, BlobResponse(found.blob.key, found.blob.content_type, name))
        answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return answer

    @post("/{id:str}/rename", guards=[needs("voices.write")])
    async def rename(
        self, request: ApiRequest, visitor: CurrentVisitor, id: FromPath[str]
    ) -> Response[Any]:
        account, form = await chosen_account(request, visitor), await read_form(request)
        try:
            name = form.text("name") or ""
            await request.services.voices.rename(account.id, _kind(id), id, name)
        except TollgateError as error:
            return await _voices_page(request, visitor, error)
        return see_other("/console/voices")

    @post("/{id:str}/delete", guards=[needs("voices.write")])
    async def remove(
        self, request: ApiRequest, visitor: CurrentVisitor, id: FromPath[str]
    ) -> Response[Any]:
        account = await chosen_account(request, visitor)
        await request.services.voices.delete(account.id, _kind(id), id)
        return see_other("/console/voices")


def _kind(id: str) -> Recorded:
    """Return what an id names; an unknown one is then not found."""
    return "consent" if id.startswith("cons_") else "voice"


async def _voices_page(
    request: ApiRequest, visitor: Visitor, error: TollgateError | None = None
) -> Response[str]:
    query, account = Query(request), await chosen_account(request, visitor)
    store = request.services.voices
    found = await store.list(account.id, "voice", limit=ROWS, after=query.text("cursor"))
    consents = await store.list(account.id, "consent", limit=CONSENTS_MAX)
    count = len(found.items)
    return await page(
        request,
        visitor,
        "stored/voices.html",
        lists=LISTS,
        title=f"{count} voice{'' if count == 1 else 's'} of {account.name}"
        if not found.more
        else f"Voices of {account.name}",
        status=error.http_status if error else 200,
        account=account,
        rows=found.items,
        consents=consents.items,
        names={each.id: each for each in consents.items},
        uses=Counter(each.consent_id for each in found.items),
        problems=problems_of(error),
        mistake=error.message if error else None,
        may_write=visitor.may("voices.write"),
        pager=query.pages(found.items[-1].id if found.more else None),
    )


HANDLERS: Final[list[Any]] = [StoredVoicePages]
