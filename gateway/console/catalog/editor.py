"""The catalog file: read it, check another text, see what that changes, save and reload it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.response import Redirect

from gateway.api.http.request import ApiRequest
from gateway.catalog.editing.draft import (
    TEXT_MAX,
    DiffLine,
    Draft,
    compare_lines,
    examine,
    example_text,
)
from gateway.catalog.editing.files import (
    KEPT,
    FileChanged,
    KeptText,
    NotWritable,
    kept_texts,
    read_kept,
    why_not_writable,
)
from gateway.catalog.reloads import digest_of
from gateway.console.answers import see_other
from gateway.console.guards import needs, require_proof
from gateway.console.queries import FormValues, Query, read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound

MISTAKES_MAX: Final = 200
"""Problems that a page shows."""


@dataclass(frozen=True, slots=True)
class Editing:
    """What the page is about: the file, and the text in the form."""

    text: str
    expected: str
    """Digest of the file that the text is to replace."""
    checked: Draft | None = None
    message: str | None = None
    is_conflict: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """The file as it is now; without it, ``unreadable`` says why."""

    content: bytes
    unreadable: str | None
    not_writable: str | None
    kept: Sequence[KeptText]

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class CatalogPages(Controller):
    path = "/catalog"

    @get("/", guards=[needs("catalog_file.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        disk = await asyncio.to_thread(_read, request)
        name, text = Query(request).text("kept"), disk.text
        if name is not None:
            text = await asyncio.to_thread(_kept_text, request, name)
        return await _page(request, visitor, disk, Editing(text, digest_of(disk.content)))

    @get("/text", guards=[needs("catalog_file.read")])
    async def download(self, request: ApiRequest) -> Response[str]:
        disk = await asyncio.to_thread(_read, request)
        return _download(disk.text, request.services.live.path.name)

    @post("/check", status_code=200, guards=[needs("catalog.write")])
    async def check(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _check(request, visitor, await read_form(request))

    @post("/draft", status_code=200, guards=[needs("catalog.write")])
    async def draft(self, request: ApiRequest) -> Response[str]:
        """Return the text of the form as a file, where the gateway cannot write its own."""
        return _download(_sent(await read_form(request))[0], request.services.live.path.name)

    @post("/save", guards=[needs("catalog.write")])
    async def save(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, services = await read_form(request), request.services
        text, expected = _sent(form)
        content = text.encode()
        if form.text("checked") != digest_of(content):
            # What it would change was shown for another text.
            return await _check(request, visitor, form)
        await require_proof(request, keep_max=TEXT_MAX)
        kept, author = services.settings.home / KEPT, visitor.author(form.text("reason") or "")
        try:
            problems = await services.live.save(content, expected, author, kept=kept)
        except FileChanged as error:
            now, message = digest_of(error.content), "Nothing was saved: the file was changed since"
            editing = Editing(text, now, await _examined(request, text), message, is_conflict=True)
        except NotWritable as error:
            message = f"Nothing was saved: {error}."
            editing = Editing(text, expected, await _examined(request, text), message)
        else:
            if not problems:
                return see_other("/console/catalog?saved=yes")
            editing = Editing(text, expected, await _examined(request, text))
        disk = await asyncio.to_thread(_read, request)
        return await _page(request, visitor, disk, editing, 409)

    @post("/reload", guards=[needs("catalog.write")])
    async def reload(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        await require_proof(request)
        if await request.services.live.reload(visitor.author()):
            disk = await asyncio.to_thread(_read, request)
            draft = await _examined(request, disk.text)
            editing = Editing(disk.text, digest_of(disk.content), draft)
            return await _page(request, visitor, disk, editing, 422)
        return Redirect("/console/catalog?saved=yes", status_code=303)


async def _check(request: ApiRequest, visitor: Visitor, form: FormValues) -> Response[str]:
    disk, (text, expected) = await asyncio.to_thread(_read, request), _sent(form)
    draft = await _examined(request, text)
    return await _page(request, visitor, disk, Editing(text, expected, draft))


def _sent(form: FormValues) -> tuple[str, str]:
    """Return the text of a form, with the line ends of a file, and the digest that it replaces.

    Raise ``InvalidRequest``.
    """
    text = form.raw("text").replace("\r\n", "\n")
    if len(text) > TEXT_MAX:
        raise InvalidRequest(
            "invalid_value", f"The text has more than {TEXT_MAX:,} characters.", param="text"
        )
    return text, form.text("expected") or ""


async def _examined(request: ApiRequest, text: str) -> Draft:
    live = request.services.live
    return await asyncio.to_thread(
        examine, text.encode(), live.path, live.in_file(), in_force=live.entry
    )


def _read(request: ApiRequest) -> Disk:
    services = request.services
    path: Path = services.live.path
    try:
        content, unreadable = path.read_bytes(), None
    except OSError as error:
        content, unreadable = b"", error.strerror or str(error)
    kept = kept_texts(services.settings.home / KEPT)
    return Disk(content, unreadable, why_not_writable(path), kept)


def _kept_text(request: ApiRequest, name: str) -> str:
    try:
        content = read_kept(request.services.settings.home / KEPT, name)
    except LookupError as error:
        raise NotFound("not_found", f"{error.args[0]}.") from None
    return content.decode(errors="replace")


def _download(text: str, name: str) -> Response[str]:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="application/yaml", headers=headers)


async def _page(
    request: ApiRequest, visitor: Visitor, disk: Disk, editing: Editing, status: int = 200
) -> Response[str]:
    live = request.services.live
    in_force, draft = digest_of(live.content), editing.checked
    on_disk = digest_of(disk.content)
    waiting: Draft | None = None
    if on_disk != in_force and disk.unreadable is None:
        waiting = await _examined(request, disk.text)
    lines: Sequence[DiffLine] = ()
    if editing.text != disk.text and (draft is not None or editing.is_conflict):
        lines = await asyncio.to_thread(compare_lines, disk.text, editing.text)
    models = len(live.names())
    return await page(
        request,
        visitor,
        "catalog/editor.html",
        title=_title(models, draft),
        status=status,
        file=str(live.path),
        disk=disk,
        size=len(disk.content),
        sha256=on_disk,
        waiting=waiting,
        editing=editing,
        draft=draft,
        lines=lines,
        source=editing.text.split("\n"),
        example=example_text(),
        is_empty=not disk.text.strip(),
        problems_max=MISTAKES_MAX,
        saved=Query(request).text("saved"),
        kept_name=Query(request).text("kept"),
        may_write=visitor.may("catalog.write"),
        base_url=str(request.base_url).rstrip("/"),
    )


def _title(models: int, draft: Draft | None) -> str:
    if draft is None:
        return f"{models} model{'' if models == 1 else 's'} on sale"
    mistakes = sum(one.level == "error" for one in draft.problems)
    if not draft.can_be_loaded:
        return f"The text has {mistakes} mistake{'' if mistakes == 1 else 's'}"
    if not draft.changes:
        return "Nothing changes for customers"
    worse = len({one.model for one in draft.changes if one.effect == "worse"})
    if worse:
        return f"{worse} model{'' if worse == 1 else 's'} would be dearer or narrower"
    return f"{len(draft.changes)} change{'' if len(draft.changes) == 1 else 's'} for customers"


HANDLERS: Final[list[Any]] = [CatalogPages]
