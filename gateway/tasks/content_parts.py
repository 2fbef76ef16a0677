"""Parts of a chat message: texts, pictures, and those that are refused by their type. Pure.

A picture becomes an attachment of the request. A message refers to it by its number, in the order
of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from gateway.catalog.schema import SOURCES_MAX, CatalogEntry
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField

PICTURES_BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum size of all pictures of a request, which a worker keeps in memory; each may have the same
part of it."""
_ROLES: Final = ("user", "tool")
"""Roles whose messages can have pictures."""
_READS: Final = {
    "image_url": "images",
    "input_audio": "audio",
    "video_url": "videos",
    "file": "files",
}


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Any | None = None
    """Hint to another vendor's prompt cache; ignored, because the prefix cache needs none."""


class RefusalPart(StrictModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(StrictModel):
    url: SourceField
    detail: Literal["auto", "low", "high"] | None = None
    """Accepted without effect: how many tokens a picture takes is up to the model."""


class ImagePart(StrictModel):
    """A picture: a data URI, an https URL or the id of an upload."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: Any | None = None

    @property
    def text(self) -> str:
        return ""


class MediaPart(BaseModel):
    """A part that is neither text nor a picture; declared only to be refused by its type."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_audio", "video_url", "file"]

    @property
    def text(self) -> str:
        return ""


Part: TypeAlias = TextPart | RefusalPart | ImagePart | MediaPart


class Pictures:
    """Collects the pictures of a conversation, in order, as far as a model takes them."""

    def __init__(self, entry: CatalogEntry) -> None:
        self._entry = entry
        self._sources: list[Source] = []

    @property
    def sources(self) -> tuple[Source, ...]:
        """The attachments, with the size that each can have."""
        most = PICTURES_BYTES_MAX // max(len(self._sources), 1)
        return tuple(
            Source(source.kind, source.given, source.param, most, PICTURES_BYTES_MAX)
            for source in self._sources
        )

    def read(self, parts: Sequence[Part], role: str, place: str) -> tuple[str | int, ...]:
        """Return a message's texts and the numbers of its pictures, or nothing if it has none.

        Raise ``InvalidRequest`` for a part that the model does not read.
        """
        found: list[str | int] = []
        for number, part in enumerate(parts):
            at = f"{place}.content.{number}"
            if isinstance(part, ImagePart):
                self._refuse(part.type, role, at)
                found.append(len(self._sources))
                self._sources.append(Source("image", part.image_url.url, f"{at}.image_url.url"))
                self._refuse_many(at)
            elif isinstance(part, MediaPart):
                raise _unreadable(self._entry, part.type, at)
            elif part.text:
                found.append(part.text)
        return tuple(found) if any(isinstance(one, int) for one in found) else ()

    def _refuse(self, kind: str, role: str, at: str) -> None:
        if "image" not in self._entry.input:
            raise _unreadable(self._entry, kind, at)
        if role not in _ROLES:
            raise InvalidRequest(
                "invalid_value",
                f"{at} is a picture in a message of the role {role}; only {' and '.join(_ROLES)} "
                "messages can have one.",
                param=at,
            )

    def _refuse_many(self, at: str) -> None:
        most = self._entry.limits.sources or SOURCES_MAX
        if len(self._sources) > most:
            count = f"picture {len(self._sources)}"
            raise InvalidRequest(
                "invalid_value",
                f"{at} is {count}, but {self._entry.name} reads at most {most} in a conversation.",
                param=at,
            )


def _unreadable(entry: CatalogEntry, kind: str, at: str) -> InvalidRequest:
    return InvalidRequest(
        "unsupported_content",
        f"{entry.name} reads no {_READS[kind]}; {at} is of type {kind}.",
        param=at,
    )
