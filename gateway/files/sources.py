"""Attachments of a request, in the forms in which they can be given. Pure.

In JSON an attachment is a data URI, an https URL or the id of an upload, as a string or as
``{"upload": id}`` or ``{"url": url}``. An upload URL of this server stands for the upload's id and
is never fetched. A form carries the bytes themselves. A request that is derived from an earlier one
refers to a blob.
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
    """Bytes from the request's form, in chunks of about a megabyte at most."""

    read: Callable[[], AsyncIterator[bytes]]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """An input or an output of an earlier request."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """A stored voice of the account, with its recording once it was looked up. The blob is attached
    without a copy."""

    voice_id: str
    blob: BlobRef | None = None


Given: TypeAlias = (
    InlineSource | RemoteSource | UploadedSource | SentSource | StoredSource | StoredVoice
)


@dataclass(frozen=True, slots=True)
class Source:
    """An attachment to fetch: the required kind, the form in which it was given, and its field."""

    kind: MediumKind
    given: Given
    param: str
    bytes_max: int | None = None
    """Maximum size in bytes, if smaller than the installation's."""
    together_bytes_max: int | None = None
    """Maximum size of all attachments of the request, if ``bytes_max`` is an equal share of it."""


def read_given(value: Any) -> Given:
    """Read the value of a field. Raise ``ValueError`` with what is accepted."""
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
        'expected a data URI (data:image/png;base64,…), an https URL, or {"upload": "file-…"}'
    )


SourceField: TypeAlias = Annotated[
    Given,
    PlainValidator(read_given),
    WithJsonSchema({"type": ["string", "object"], "description": "data URI, https URL or upload"}),
]
"""A field of an input that holds an image, a video or audio."""
