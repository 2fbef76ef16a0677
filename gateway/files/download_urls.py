"""Presigned download URLs, each for one blob: signing and checking.

The signature covers the blob's path and the expiry, with a key derived from the server's secret, so
any gateway can check URLs of another and nothing is stored. Without a valid signature, the answer
does not reveal whether a blob exists.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from gateway.errors import Forbidden, Gone, NotFound
from workers.contract.jobs import BlobRef
from workers.contract.kinds import EXTENSIONS, type_of_extension

PATH: Final = "/v1/blobs"

_PLACE: Final = re.compile(
    r"(req_[0-9a-f]{32})/([A-Za-z0-9_-]{1,128})/([0-9]{1,6})\.([a-z0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """Location of a blob. The account is not part of the URL; only the server knows it."""

    request_id: str
    nonce: str
    number: str
    content_type: str

    def key(self, account_id: int) -> str:
        return f"{account_id}/{self.request_id}/{self.nonce}/{self.number}"


@dataclass(frozen=True, slots=True)
class DownloadUrl:
    url: str
    expires_at: int
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class UrlSigner:
    """Signs URLs below ``base``, each valid for at least ``valid_s`` seconds."""

    secret: bytes
    valid_s: int
    base: str

    @classmethod
    def make(cls, pepper: bytes, *, valid_s: float, base: str) -> UrlSigner:
        return cls(hmac.digest(pepper, b"blobs", hashlib.sha256), int(valid_s), base.rstrip("/"))

    def at(self, base: str) -> UrlSigner:
        return replace(self, base=base.rstrip("/"))

    def until(self, moment: datetime) -> UrlSigner:
        """Return a signer whose URLs are valid until ``moment``, and at least ``valid_s``."""
        left_s = math.ceil(moment.timestamp() - time.time())
        return replace(self, valid_s=max(self.valid_s, left_s))

    def link(self, blob: BlobRef) -> DownloadUrl:
        """Return a presigned URL of a request's blob."""
        _, path = blob.key.split("/", 1)
        path = f"{path}.{EXTENSIONS.get(blob.content_type, 'bin')}"
        # Rounded to minutes, so that repeated calls return the same URL and it can be cached.
        expires_at = (int(time.time()) // 60 + 1) * 60 + self.valid_s
        signature = _sign(self.secret, path, expires_at)
        url = f"{self.base}{PATH}/{path}?expires={expires_at}&signature={signature}"
        return DownloadUrl(url, expires_at)

    def check(self, path: str, *, expires: str | None, signature: str | None) -> BlobLocation:
        """Check a presigned URL. Raise ``NotFound``, ``Forbidden`` or ``Gone``."""
        found = _PLACE.fullmatch(path)
        if found is None:
            raise NotFound("blob_not_found", "This path does not name a blob.")
        expires_at = int(expires) if expires and re.fullmatch(r"[0-9]{1,12}", expires) else 0
        right = _sign(self.secret, path, expires_at)
        if not hmac.compare_digest(right.encode(), (signature or "").encode()):
            raise Forbidden(
                "invalid_signature",
                "The signature of this URL is invalid; fetch the request again for a new URL.",
            )
        if expires_at < time.time():
            raise Gone(
                "link_expired",
                "This URL has expired; GET /v1/requests/{id} returns a new one.",
            )
        request_id, nonce, number, extension = found.groups()
        return BlobLocation(request_id, nonce, number, type_of_extension(extension))


def _sign(secret: bytes, path: str, expires_at: int) -> str:
    digest = hmac.digest(secret, f"{path}\n{expires_at}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
