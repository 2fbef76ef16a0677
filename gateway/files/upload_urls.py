"""Presigned upload URLs, each for one file; the upload itself needs no API key. Pure.

Nothing is stored before the upload: the URL carries account, file id, content type and expiry,
signed with a key derived from the server's secret. Requests of the same account refer to the file
by the URL without its signature; that URL is never fetched and grants no access.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

from gateway.errors import Forbidden, Gone
from gateway.ids import new_id
from workers.contract.kinds import kind_of
from workers.contract.media import MediumKind

PATH: Final = "/v1/uploads"
VALID_S: Final = 900

CONTENT_TYPES: Final[Mapping[str, str]] = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    # Not the registered name, but what clients that announce jpg send.
    "jpg": "image/jpg",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "mp3": "audio/mp3",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "m4a": "audio/mp4",
}
"""Accepted file types, with the content type that the upload must have."""

_NAME: Final = re.compile(r"(file-[0-9a-f]{32})\.([a-z0-9]{3,4})")
_PUBLIC: Final = re.compile(r"(?:/.*)?" + PATH + r"/(file-[0-9a-f]{32})\.[a-z0-9]{3,4}")


@dataclass(frozen=True, slots=True)
class UploadUrl:
    """Account, id and content type of a file to be uploaded."""

    account_id: int
    file_id: str
    content_type: str

    @property
    def kind(self) -> MediumKind:
        return cast(MediumKind, kind_of(self.content_type))


@dataclass(frozen=True, slots=True)
class UploadUrls:
    secret: bytes

    @classmethod
    def make(cls, pepper: bytes) -> UploadUrls:
        return cls(hmac.digest(pepper, b"uploads", hashlib.sha256))

    def open(
        self, account_id: int, file_type: str, *, base: str, file_id: str | None = None
    ) -> tuple[str, str]:
        """Return the presigned URL to upload a file to, and the URL by which requests refer to it.

        Raise ``KeyError`` if the file type is not accepted.
        """
        assert CONTENT_TYPES[file_type]
        url = f"{base.rstrip('/')}{PATH}/{file_id or new_id('file-')}.{file_type}"
        expires_at = int(time.time()) + VALID_S
        name = url.rpartition("/")[2]
        signature = self._sign(name, str(account_id), expires_at)
        query = f"account={account_id}&expires={expires_at}&signature={signature}"
        return f"{url}?{query}", url

    def check(
        self, name: str, *, account: str | None, expires: str | None, signature: str | None
    ) -> UploadUrl:
        """Check a presigned URL. Raise ``Forbidden`` or ``Gone``."""
        expires_at = int(expires) if expires and re.fullmatch(r"[0-9]{1,12}", expires) else 0
        right = self._sign(name, account or "", expires_at)
        found = _NAME.fullmatch(name)
        if found is None or not hmac.compare_digest(right.encode(), (signature or "").encode()):
            raise Forbidden("invalid_signature", "The signature of this URL is invalid.")
        if expires_at < time.time():
            raise Gone("link_expired", "This URL has expired; request a new one.")
        file_id, file_type = found.groups()
        return UploadUrl(int(account or 0), file_id, CONTENT_TYPES[file_type])

    def _sign(self, name: str, account: str, expires_at: int) -> str:
        text = f"{name}\n{account}\n{expires_at}"
        digest = hmac.digest(self.secret, text.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def uploaded_file_id(url: str) -> str | None:
    """Return the id of the file that an upload URL refers to, whatever its host; None for any other
    URL."""
    try:
        found = _PUBLIC.fullmatch(urlsplit(url).path)
    except ValueError:
        return None
    return found[1] if found else None
