"""Views of images, videos and audio: each with a presigned URL or, on request, its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NotRequired, TypedDict, cast

import msgspec

from gateway.api.http.request import ApiRequest
from gateway.errors import Gone, TollgateError, TooLarge, Unavailable
from gateway.files.base64 import INLINE_BYTES_MAX, as_base64
from gateway.files.download_urls import UrlSigner
from gateway.ledger.closed import ClosedRequest
from workers.contract.blobs import BlobError, BlobMissing, Blobs
from workers.contract.jobs import BlobRef
from workers.contract.media import Medium

EXPIRED: Final = "This output has expired and was deleted."


class LinkView(TypedDict):
    """A presigned URL and when it expires."""

    url: str
    url_expires_at: str


class MediumView(TypedDict):
    """One output. A failed one has an ``error`` and no URL. Fields that are 0 are omitted."""

    kind: str
    index: int
    role: str
    content_type: NotRequired[str]
    width: NotRequired[int]
    height: NotRequired[int]
    duration_ms: NotRequired[int]
    fps: NotRequired[int]
    sample_rate: NotRequired[int]
    seed: NotRequired[int]
    error: NotRequired[str]
    cut: NotRequired[bool]
    bytes: NotRequired[int]
    sha256: NotRequired[str]
    url: NotRequired[str]
    url_expires_at: NotRequired[str]
    b64_json: NotRequired[str]


def links_of(request: ApiRequest) -> UrlSigner:
    """Return the signer of URLs at which this client reaches the gateway."""
    return (
        request.services.links
        if request.services.settings.public_url
        else request.services.links.at(str(request.base_url))
    )


def media_of(closed: ClosedRequest) -> Sequence[Medium]:
    """Return all outputs of a request, including failed ones."""
    value = closed.output.value if closed.output else {}
    return msgspec.convert(value.get("media", ()), tuple[Medium, ...])


def blob_of(closed: ClosedRequest, medium: Medium) -> BlobRef | None:
    if closed.output is None or medium.blob is None:
        return None
    return closed.output.blobs[medium.blob]


def media_views(closed: ClosedRequest, links: UrlSigner) -> list[MediumView]:
    """Return outputs in the native shape, each with a new presigned URL."""
    views = []
    for medium in media_of(closed):
        blob = blob_of(closed, medium)
        view = medium_view(medium, blob)
        if blob is not None:
            link = link_view(blob, links)
            view["url"], view["url_expires_at"] = link["url"], link["url_expires_at"]
        views.append(view)
    return views


def medium_view(medium: Medium, blob: BlobRef | None) -> MediumView:
    """Return an output in the native shape, without a URL."""
    shown = {
        **msgspec.to_builtins(medium),
        "kind": medium.kind,
        "index": medium.index,
        "role": medium.role,
    }
    shown.pop("blob", None)
    view = cast("MediumView", shown)
    if blob is not None:
        view["content_type"] = blob.content_type
        view["bytes"] = blob.bytes
        view["sha256"] = blob.sha256
    return view


def link_view(blob: BlobRef, links: UrlSigner) -> LinkView:
    link = links.link(blob)
    expires_at = datetime.fromtimestamp(link.expires_at, UTC).isoformat().replace("+00:00", "Z")
    return {"url": link.url, "url_expires_at": expires_at}


async def read_base64(blobs: Blobs, found: Sequence[BlobRef]) -> list[str]:
    """Read outputs into memory, to be included in a response. Raise ``TollgateError``."""
    size = sum(blob.bytes for blob in found)
    if size > INLINE_BYTES_MAX:
        raise TooLarge(
            "output_too_large",
            f"The output has {size} bytes; a response can include at most {INLINE_BYTES_MAX}. "
            "Request its URL instead.",
        )
    try:
        return [await as_base64(blobs, blob) for blob in found]
    except BlobError as error:
        raise unreadable(error) from None


def unreadable(error: BlobError) -> TollgateError:
    """Convert an error of the blob store."""
    if isinstance(error, BlobMissing):
        return Gone("blob_expired", EXPIRED)
    return Unavailable("blobs_unavailable", "The blob store is unavailable.", retry_after_s=2)
