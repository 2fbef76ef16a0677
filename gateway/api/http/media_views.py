"""How pictures, videos and sound are shown: each with an address that works for a while, or with
its bytes where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NotRequired, TypedDict, cast

import msgspec

from gateway.api.http.request import ApiRequest
from gateway.errors import Gone, TollgateError, TooLarge, Unavailable
from gateway.files.base64 import INLINE_BYTES_MAX, as_base64
from gateway.files.download_urls import UrlSigner
from gateway.ledger.closed import ClosedRequest
from workers.contract.blobs import BlobError, BlobMissing, Blobs
from workers.contract.jobs import BlobRef
from workers.contract.media import Medium


class LinkView(TypedDict):
    """A signed address and when it expires."""

    url: str
    url_expires_at: str


class MediumView(TypedDict):
    """One output; one that failed has an ``error`` and no address. Fields that are 0 are absent."""

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
    """The addresses to show to whoever calls: those at which it reaches the gateway."""
    return (
        request.services.links
        if request.services.settings.public_url
        else request.services.links.at(str(request.base_url))
    )


def media_of(closed: ClosedRequest) -> Sequence[Medium]:
    """Every output of a request, also those that failed."""
    value = closed.output.value if closed.output else {}
    return msgspec.convert(value.get("media", ()), tuple[Medium, ...])


def blob_of(closed: ClosedRequest, medium: Medium) -> BlobRef | None:
    if closed.output is None or medium.blob is None:
        return None
    return closed.output.blobs[medium.blob]


def media_views(closed: ClosedRequest, links: UrlSigner) -> list[MediumView]:
    """Outputs in our own shape, each under a fresh address."""
    views = []
    for medium in media_of(closed):
        blob = blob_of(closed, medium)
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
            link = link_view(blob, links)
            view["url"], view["url_expires_at"] = link["url"], link["url_expires_at"]
        views.append(view)
    return views


def link_view(blob: BlobRef, links: UrlSigner) -> LinkView:
    link = links.link(blob)
    expires_at = datetime.fromtimestamp(link.expires_at, UTC).isoformat().replace("+00:00", "Z")
    return {"url": link.url, "url_expires_at": expires_at}


async def read_base64(blobs: Blobs, found: Sequence[BlobRef]) -> list[str]:
    """Read outputs whole, to be part of an answer. Raise ``TollgateError``."""
    size = sum(blob.bytes for blob in found)
    if size > INLINE_BYTES_MAX:
        raise TooLarge(
            "output_too_large",
            f"The output has {size} bytes, of which an answer holds at most {INLINE_BYTES_MAX}; "
            "ask for its address instead.",
        )
    try:
        return [await as_base64(blobs, blob) for blob in found]
    except BlobError as error:
        raise unreadable(error) from None


def unreadable(error: BlobError) -> TollgateError:
    """Say why an output cannot be read."""
    if isinstance(error, BlobMissing):
        return Gone("blob_expired", "This output was kept for its time and is deleted.")
    return Unavailable(
        "blobs_unavailable", "The store of outputs does not answer.", retry_after_s=2
    )
