"""What a client sends along, in the ways in which it can be given. Pure.

In JSON a source is a data URI, an https address, or the id of an upload, alone or as
``{"upload": id}`` or ``{"url": address}``; the address of an upload here stands for its id and is
never called. A form brings the bytes themselves, and what is made
from an earlier request refers to what lies in the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, WithJsonSchema

from gateway.files.upload_urls import uploaded_file_id
from workers.contract.jobs import BlobRef
from workers.contract.media import MediumKind


@dataclass(frozen=True, slots=True)
class InlineSource:
    """A data URI."""

    uri: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RemoteSource:
    url: str


@dataclass(frozen=True, slots=True)
class UploadedSource:
    file_id: str


@dataclass(frozen=True, slots=True)
class SentSource:
    """Bytes that came with the request itself, in pieces of at most about a megabyte."""

    read: Callable[[], AsyncIterator[bytes]]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """Something that an earlier request was given or gave."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """A voice that the account keeps, and its recording once it was looked up: attached as it lies,
    copied for nobody."""

    voice_id: str
    blob: BlobRef | None = None


Given: TypeAlias = (
    InlineSource | RemoteSource | UploadedSource | SentSource | StoredSource | StoredVoice
)


@dataclass(frozen=True, slots=True)
class Source:
    """One attachment to be: what it must be, how it was given, and in which field."""

    kind: MediumKind
    given: Given
    param: str
    bytes_max: int | None = None
    """Where less is taken than of others."""


def read_given(value: Any) -> Given:
    """Read what stands in a field. Raise ``ValueError`` with what would have been accepted."""
    if isinstance(value, InlineSource | RemoteSource | UploadedSource | SentSource | StoredSource):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
        if name in ("upload", "file_id") and isinstance(inner, str):
            return UploadedSource(inner)
        if name in ("url", "image_url") and isinstance(inner, str):
            return read_given(inner)
    if isinstance(value, str):
        if value.startswith("data:"):
            return InlineSource(value)
        if value.startswith(("https://", "http://")):
            uploaded = uploaded_file_id(value)
            return UploadedSource(uploaded) if uploaded is not None else RemoteSource(value)
        if value.startswith("file-"):
            return UploadedSource(value)
    raise ValueError(
        'this is a data URI (data:image/png;base64,…), an https address, or {"upload": "file-…"}'
    )


SourceField: TypeAlias = Annotated[
    Given,
    PlainValidator(read_given),
    WithJsonSchema(
        {"type": ["string", "object"], "description": "data URI, https address or upload"}
    ),
]
"""A field of an input that holds a picture, a video or a sound."""
