"""Addresses under which anybody can read one output for a while: made and checked.

The signature covers the request, the place and the time, under a secret that derives from the
server's own, so any gateway can check what another one has signed and nothing is stored. Whether
something lies there is not said to anybody who has no signature for it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from gateway.errors import Forbidden, Gone, NotFound
from workers.contract.jobs import BlobRef
from workers.contract.kinds import EXTENSIONS, of_extension

PATH: Final = "/v1/blobs"

_PLACE: Final = re.compile(
    r"(req_[0-9a-f]{32})/([A-Za-z0-9_-]{1,128})/([0-9]{1,6})\.([a-z0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class BlobLocation:
    """Where something lies; its account is known to the server alone."""

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
    """Makes addresses below ``base``, each valid for ``valid_s``."""

    secret: bytes
    valid_s: int
    base: str

    @classmethod
    def make(cls, pepper: bytes, *, valid_s: float, base: str) -> UrlSigner:
        return cls(hmac.digest(pepper, b"blobs", hashlib.sha256), int(valid_s), base.rstrip("/"))

    def at(self, base: str) -> UrlSigner:
        return replace(self, base=base.rstrip("/"))

    def until(self, moment: datetime) -> UrlSigner:
        """Make addresses that work until then, or for as long as any does."""
        left_s = int((moment - datetime.now(UTC)).total_seconds())
        return replace(self, valid_s=max(self.valid_s, left_s))

    def link(self, blob: BlobRef) -> DownloadUrl:
        """Make an address of a blob that belongs to a request."""
        _, path = blob.key.split("/", 1)
        path = f"{path}.{EXTENSIONS.get(blob.content_type, 'bin')}"
        # Whole minutes, so that an address that is shown twice can be cached.
        expires_at = (int(time.time()) // 60 + 1) * 60 + self.valid_s
        signature = _sign(self.secret, path, expires_at)
        url = f"{self.base}{PATH}/{path}?expires={expires_at}&signature={signature}"
        return DownloadUrl(url, expires_at)

    def check(self, path: str, *, expires: str | None, signature: str | None) -> BlobLocation:
        """Read a signed address. Raise ``NotFound``, ``Forbidden`` or ``Gone``."""
        found = _PLACE.fullmatch(path)
        if found is None:
            raise NotFound("blob_not_found", "There is nothing of that name.")
        expires_at = int(expires) if expires and re.fullmatch(r"[0-9]{1,12}", expires) else 0
        right = _sign(self.secret, path, expires_at)
        if not hmac.compare_digest(right.encode(), (signature or "").encode()):
            raise Forbidden(
                "invalid_signature",
                "This address was not made here, or was changed; fetch the request for a new one.",
            )
        if expires_at < time.time():
            raise Gone(
                "link_expired",
                "This address has expired; GET /v1/requests/{id} gives a fresh one.",
            )
        request_id, nonce, number, extension = found.groups()
        return BlobLocation(request_id, nonce, number, of_extension(extension))


def _sign(secret: bytes, path: str, expires_at: int) -> str:
    digest = hmac.digest(secret, f"{path}\n{expires_at}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
