"""The catalog file over HTTP: read it, see what another text would change, save and reload it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get, post, put
from litestar.params import JSONBody
from pydantic import ConfigDict, Field

from gateway.api.http.answers import json_response
from gateway.api.http.operations import author_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.editing.draft import TEXT_MAX, CatalogDiffView, diff_view, examine
from gateway.catalog.editing.files import KEPT, FileChanged, NotWritable, why_not_writable
from gateway.catalog.problems import CatalogProblem
from gateway.catalog.reloads import digest_of
from gateway.errors import Conflict, InvalidRequest, Unavailable
from gateway.operations.bodies import Body


class CatalogTextBody(Body):
    """A text to be compared with the catalog in force."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "version: 1\nmodels: []\n"}]}
    )

    text: Annotated[str, Field(max_length=TEXT_MAX)]


class CatalogSaveBody(CatalogTextBody):
    """A text that replaces the catalog file, if that still has the digest ``expected_sha256``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"text": "version: 1\nmodels: []\n", "expected_sha256": "9f2c…"}]
        }
    )

    expected_sha256: Annotated[str, Field(max_length=64)]


class ReloadedView(TypedDict):
    object: Literal["catalog"]
    models: int


class CatalogFileView(TypedDict):
    """The catalog file of this gateway. ``sha256_in_force`` differs from ``sha256`` if the file was
    edited and not reloaded; ``not_writable`` is the reason why it cannot be saved here."""

    object: Literal["catalog.file"]
    path: str
    sha256: str
    sha256_in_force: str
    not_writable: str | None
    text: str


class CatalogFileController(Controller):
    path = "/v1/admin/catalog"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "catalog"}

    @get(operation_id="GetCatalogFile", summary="Return the catalog file as text, with its digest")
    async def show(self, request: ApiRequest) -> Response[CatalogFileView]:
        live = request.services.live
        try:
            content = await asyncio.to_thread(live.path.read_bytes)
        except OSError as error:
            raise Unavailable(
                "catalog_unreadable", f"{live.path} cannot be read: {error.strerror}."
            ) from None
        return json_response(
            {
                "object": "catalog.file",
                "path": str(live.path),
                "sha256": digest_of(content),
                "sha256_in_force": digest_of(live.content),
                "not_writable": await asyncio.to_thread(why_not_writable, live.path),
                "text": content.decode(errors="replace"),
            }
        )

    @post(
        "/diff",
        status_code=200,
        operation_id="DiffCatalog",
        summary="Check a text as a catalog, and return what it would change for customers",
        description="Changes nothing. `models` is null if the text cannot be loaded.",
        opt={"reads": True},
    )
    async def diff(
        self, request: ApiRequest, data: JSONBody[CatalogTextBody]
    ) -> Response[CatalogDiffView]:
        live = request.services.live
        draft = await asyncio.to_thread(
            examine, data.text.encode(), live.path, live.in_file(), in_force=live.entry
        )
        return json_response(diff_view(draft))

    @put(
        operation_id="SaveCatalog",
        summary="Replace the catalog file, and load it in all gateways that share it",
        description=(
            "Atomic: a text with mistakes changes nothing. 409 `catalog_changed` if the file was "
            "changed since it was read. The last ten texts are kept in the home."
        ),
        opt={"errors": [409]},
    )
    async def save(
        self, request: ApiRequest, data: JSONBody[CatalogSaveBody]
    ) -> Response[ReloadedView]:
        services = request.services
        kept = services.settings.home / KEPT
        try:
            problems = await services.live.save(
                data.text.encode(), data.expected_sha256, author_of(request), kept=kept
            )
        except FileChanged as error:
            raise Conflict(
                "catalog_changed",
                "Nothing was saved: the file was changed meanwhile. Read it again, and compare.",
                param="expected_sha256",
                details={"sha256": digest_of(error.content)},
            ) from None
        except NotWritable as error:
            raise Conflict("catalog_not_writable", f"Nothing was saved: {error}.") from None
        return _loaded(request, problems)

    @post(
        "/reload",
        status_code=200,
        operation_id="ReloadCatalog",
        summary="Reload catalog.yaml; a changed price becomes a new price version",
        description="Other gateways follow as soon as their own file has the same text.",
    )
    async def reload(self, request: ApiRequest) -> Response[ReloadedView]:
        return _loaded(request, await request.services.live.reload(author_of(request)))


def _loaded(request: ApiRequest, problems: tuple[CatalogProblem, ...]) -> Response[ReloadedView]:
    if problems:
        raise InvalidRequest(
            "invalid_catalog",
            f"The catalog was not changed: {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
            details={"problems": [str(problem) for problem in problems]},
        )
    return json_response({"object": "catalog", "models": len(request.services.live.names())})
