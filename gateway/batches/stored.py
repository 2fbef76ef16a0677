"""Inserts a batch's blob outputs into its file when the file is written.

While the batch runs, answers contain references instead: the bytes would be too many for SQL, and
URLs could expire before the file is read. A line embeds as many bytes as an answer of the live
endpoint, and a file as many as an upload. Outputs beyond that, and missing ones, are given by URL
only: as errors they would be requested, and paid for, again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from gateway.files.base64 import INLINE_BYTES_MAX, as_base64
from gateway.files.download_urls import UrlSigner
from workers.contract.blobs import BlobDamaged, BlobMissing, Blobs
from workers.contract.jobs import BlobRef

log = logging.getLogger(__name__)

Form: TypeAlias = Literal["url", "b64_json"]
PLACE: Final = "stored"
"""Field that holds the reference to an output."""

_Object: TypeAlias = dict[str, msgspec.Raw]
_encode = msgspec.json.Encoder().encode


class _Place(msgspec.Struct, frozen=True):
    blob: BlobRef
    form: Form | None


def place(blob: BlobRef, form: Form | None) -> dict[str, Any]:
    """Return a reference to an output, to be replaced in one form, or in both if None."""
    return {PLACE: msgspec.to_builtins(_Place(blob, form))}


class StoredOutputs:
    def __init__(self, blobs: Blobs, urls: UrlSigner, *, file_bytes_max: int) -> None:
        self._blobs = blobs
        self._urls = urls
        self._file_bytes_max = file_bytes_max

    def writer(self, kept_until: datetime) -> Writer:
        """Return a writer for a file whose outputs are kept until ``kept_until``."""
        return Writer(self._blobs, self._urls.until(kept_until), self._file_bytes_max)


class Writer:
    """Writes the lines of one file. Repeating it with the same lines gives the same result."""

    def __init__(self, blobs: Blobs, urls: UrlSigner, room: int) -> None:
        self._blobs = blobs
        self._urls = urls
        self._room = room

    async def write(self, text: bytes) -> bytes:
        """Replace the references in a line by outputs. Raise ``BlobUnavailable``."""
        line = _read(text)
        response = _read(line["response"])
        body: dict[str, Any] = _read(response["body"])
        if "data" in body:
            body["data"] = await self._filled(body["data"])
        elif (output := _read_member(body, "output")) is not None and "media" in output:
            body["output"] = {**output, "media": await self._filled(output["media"])}
        else:
            return text
        return _encode({**line, "response": {**response, "body": body}})

    async def _filled(self, outputs: msgspec.Raw) -> list[dict[str, Any]]:
        """Return outputs with bytes or URLs in place of references; failed ones have none."""
        shown = msgspec.json.decode(outputs, type=list[_Object])
        places = [
            msgspec.json.decode(each.pop(PLACE), type=_Place) if PLACE in each else None
            for each in shown
        ]
        inline = self._fits([found for found in places if found is not None])
        return [
            {**({} if found is None else await self._given(found, inline=inline)), **each}
            for found, each in zip(places, shown, strict=True)
        ]

    def _fits(self, places: Sequence[_Place]) -> bool:
        """Return whether a line's outputs still fit into the file, and reserve their space."""
        size = sum(found.blob.bytes for found in places if found.form != "url")
        if size > INLINE_BYTES_MAX or size * 4 // 3 > self._room:
            return False
        self._room -= size * 4 // 3
        return True

    async def _given(self, found: _Place, *, inline: bool) -> dict[str, Any]:
        text = None
        if inline and found.form != "url":
            try:
                text = await as_base64(self._blobs, found.blob)
            except (BlobMissing, BlobDamaged) as error:
                log.warning("giving %s by URL only: %s", found.blob.key, error)
        given = {} if text is None else {"b64_json": text}
        if text is not None and found.form == "b64_json":
            return given
        return {"url": self._urls.link(found.blob).url, **given}


def _read_member(body: dict[str, Any], name: str) -> _Object | None:
    """Return a member of an object that is an object itself."""
    text = bytes(body.get(name, b""))
    return _read(text) if text.startswith(b"{") else None


def _read(text: bytes | msgspec.Raw) -> _Object:
    return msgspec.json.decode(text, type=_Object)
