"""Outputs of a batch that lie in the blob store, put into its file when that is written.

While the batch runs, an answer has references in their place: bytes in SQL would be many, and an
address made then would be old when the file is read. A line holds as many bytes as an answer of the
live endpoint, and a file as many as an upload; whatever is beyond, or is gone, is given by its
address alone, for it is paid for and would only be ordered again.
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
"""The field that stands where an output is to be put in."""

_Object: TypeAlias = dict[str, msgspec.Raw]
_encode = msgspec.json.Encoder().encode


class _Place(msgspec.Struct, frozen=True):
    blob: BlobRef
    form: Form | None


def place(blob: BlobRef, form: Form | None) -> dict[str, Any]:
    """Stand for an output in a form, or in both."""
    return {PLACE: msgspec.to_builtins(_Place(blob, form))}


class StoredOutputs:
    def __init__(self, blobs: Blobs, urls: UrlSigner, *, file_bytes_max: int) -> None:
        self._blobs = blobs
        self._urls = urls
        self._file_bytes_max = file_bytes_max

    def writer(self, kept_until: datetime) -> Writer:
        """Begin a file whose outputs are kept until then."""
        return Writer(self._blobs, self._urls.until(kept_until), self._file_bytes_max)


class Writer:
    """Writes the lines of one file, the same ones in the same order each time."""

    def __init__(self, blobs: Blobs, urls: UrlSigner, room: int) -> None:
        self._blobs = blobs
        self._urls = urls
        self._room = room

    async def write(self, text: bytes) -> bytes:
        """Put outputs into a line. Raise ``BlobUnavailable``."""
        line = _read(text)
        response = _read(line["response"])
        body = _read(response["body"])
        if "data" not in body:
            return text
        shown = msgspec.json.decode(body["data"], type=list[_Object])
        places = [msgspec.json.decode(each[PLACE], type=_Place) for each in shown]
        inline = self._fits(places)
        filled = [
            {**await self._given(found, inline=inline), **each}
            for found, each in zip(places, shown, strict=True)
        ]
        for each in filled:
            del each[PLACE]
        return _encode({**line, "response": {**response, "body": {**body, "data": filled}}})

    def _fits(self, places: Sequence[_Place]) -> bool:
        """Say whether the bytes of one line are still to be given, and take their room."""
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
                log.warning("%s is given by its address: %s", found.blob.key, error)
        given = {} if text is None else {"b64_json": text}
        if text is not None and found.form == "b64_json":
            return given
        return {"url": self._urls.link(found.blob).url, **given}


def _read(text: bytes | msgspec.Raw) -> _Object:
    return msgspec.json.decode(text, type=_Object)
