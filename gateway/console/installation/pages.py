"""Settings, the API's reference, and what this version consists of."""

from __future__ import annotations

import asyncio
import json
import platform
from typing import Any, Final, cast

from litestar import Controller, Litestar, Response, get
from litestar.params import FromPath

from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.console.assets import bundled_packages, load_assets
from gateway.console.guards import needs
from gateway.console.installation.document import ApiReference, example_of, read_document
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.views.models import shell_json
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.doctor.settings_report import describe, is_changed, matching, risks
from gateway.errors import NotFound

ORIGINS: Final = {
    "environment": "environment",
    "file": "file in the home",
    "start": "given at the start",
    "default": "default",
}
_KEPT: Final = "console_reference"


class InstallationPages(Controller):
    path = "/"

    @get("/settings", guards=[needs("settings.read")])
    async def settings(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, settings = Query(request), request.services.settings
        views = describe(settings)
        found = matching(views, query.text("q"))
        if query.text("changed"):
            found = [one for one in found if is_changed(one)]
        warnings = risks(settings)
        serious = sum(one.level != "note" for one in warnings)
        changed = sum(map(is_changed, views))
        return await page(
            request,
            visitor,
            "installation/settings.html",
            title=(
                f"{serious} risk{'' if serious == 1 else 's'} in the settings"
                if serious
                else f"{changed} of {len(views)} settings differ from their default"
            ),
            rows=found,
            risks=warnings,
            origins=ORIGINS,
            changed={one["name"] for one in views if is_changed(one)},
            filters=query.values,
        )

    @get("/docs", guards=[needs("catalog.read")])
    async def reference(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, document = Query(request), await read_reference(request.app)
        tag = query.one_of("tag", tuple(document.tags))
        found = [one for one in document.find(query.text("q"), tag) if _is_for(visitor, one.path)]
        groups = {
            name: (text, routes)
            for name, text in document.tags.items()
            if (routes := [one for one in found if one.tag == name])
        }
        return await page(
            request,
            visitor,
            "installation/docs.html",
            title=f"{len(found)} routes of the API",
            groups=groups,
            tags=tuple(document.tags),
            filters=query.values,
            base_url=str(request.base_url).rstrip("/"),
        )

    @get("/docs/types/{name:str}", guards=[needs("catalog.read")])
    async def type(
        self, request: ApiRequest, visitor: CurrentVisitor, name: FromPath[str]
    ) -> Response[str]:
        document = await read_reference(request.app)
        if name not in document.schemas:
            raise NotFound("not_found", f"The API has no type {name!r}.")
        schema = document.schemas[name]
        return await page(
            request,
            visitor,
            "installation/type.html",
            title=name,
            description=schema.get("description", "").replace("`", ""),
            fields=document.fields_of(name),
            schema=json.dumps(schema, indent=2, ensure_ascii=False),
        )

    @get("/docs/{operation:str}", guards=[needs("catalog.read")])
    async def operation(
        self, request: ApiRequest, visitor: CurrentVisitor, operation: FromPath[str]
    ) -> Response[str]:
        document = await read_reference(request.app)
        found = document.operations.get(operation)
        if found is None or not _is_for(visitor, found.path):
            raise NotFound("not_found", f"The API has no route {operation!r}.")
        query, live = Query(request), request.services.live
        entries = live.entries(visitor.account_id or 0)
        has_model = any(one.name == "model" for body in found.bodies for one in body.fields)
        named = query.text("model")
        entry = next((each for each in entries if each.name == named), None)
        if entry is None and has_model:
            entry = _usual(entries, found.id)
        example = example_of(found.bodies[0], entry, document.schemas) if found.bodies else None
        return await page(
            request,
            visitor,
            "installation/operation.html",
            title=found.summary or found.id,
            one=found,
            models=[each.name for each in entries] if has_model else (),
            model=entry.name if entry else "",
            example=None if example is None else json.dumps(example, indent=2, ensure_ascii=False),
            shell=None if example is None else shell_json(example),
            base_url=str(request.base_url).rstrip("/"),
        )

    @get("/about", guards=[needs("own.write")])
    async def about(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        document = await read_reference(request.app)
        assets = load_assets()
        return await page(
            request,
            visitor,
            "installation/about.html",
            title=f"Tollgate {document.version}",
            version=document.version,
            python=platform.python_version(),
            digest=assets.digest,
            packages=[
                (each, assets.files[each.licence_file].content.decode())
                for each in bundled_packages()
            ],
        )


def _is_for(visitor: Visitor, path: str) -> bool:
    """Whether a route is shown: those of administrators to roles of the installation."""
    return visitor.role is not None or not path.startswith("/v1/admin")


def _usual(entries: tuple[CatalogEntry, ...], operation: str) -> CatalogEntry | None:
    """Return a model for the example of a route, by what the route makes."""
    makes = {
        "Image": "text-to-image",
        "Speech": "text-to-speech",
        "Embedding": "text-embedding",
        "Rerank": "rerank",
        "Transcription": "speech-to-text",
        "Translation": "speech-to-text",
        "Video": "text-to-video",
        "Music": "text-to-music",
    }
    task = next((each for word, each in makes.items() if word in operation), "text-generation")
    return next((each for each in entries if each.task == task), entries[0] if entries else None)


async def read_reference(app: Litestar) -> ApiReference:
    """Return the document, read once per process: making it takes a second."""
    state = app.state
    if _KEPT not in state:
        schema = await asyncio.to_thread(app.openapi_schema.to_schema)
        state[_KEPT] = await asyncio.to_thread(read_document, schema)
    return cast("ApiReference", state[_KEPT])


HANDLERS: Final[list[Any]] = [InstallationPages]
