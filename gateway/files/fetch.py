"""Stores a request's attachments in the blob store, before credit is held for the request.

Each attachment is bounded in size, all of a request's together in time, and the first bytes must
show a type that the task reads. URLs are fetched over TLS, without credentials or cookies, never in
a private network, and each redirect is checked like the first URL. If an attachment is refused, the
caller discards those already stored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import unquote_to_bytes, urljoin

import httpx

from gateway.checks.public_urls import check_public_url
from gateway.errors import InvalidRequest, TollgateError, TooLarge, Unavailable
from gateway.files.retention import INPUT_PREFIX
from gateway.files.room import Room
from gateway.files.sources import (
    InlineSource,
    RemoteSource,
    SentSource,
    Source,
    StoredSource,
    StoredVoice,
    UploadedSource,
)
from gateway.files.spool import SPOOL
from gateway.files.store import Files
from workers.contract.addresses import PrivateAddress, pin
from workers.contract.blobs import BlobError, BlobMissing, Blobs, blob_key
from workers.contract.jobs import BlobRef, RequestId
from workers.contract.kinds import HEAD_BYTES, accepted_types, can_contain, sniff
from workers.contract.media import MediumKind

CHUNK_BYTES: Final = 1024 * 1024
REDIRECTS_MAX: Final = 5
FREE_BYTES_MIN: Final = 1024 * 1024
"""Disk space required before attachments are fetched, whose sizes are unknown, in bytes."""
LARGE_BODIES_MAX: Final = 4
"""Maximum number of large bodies whose files are stored concurrently."""
CONCURRENCY: Final = 64
"""Maximum number of URLs that one gateway fetches concurrently."""


class Fetcher:
    """Fetches attachments. Owns an HTTP client and must be closed."""

    def __init__(
        self,
        blobs: Blobs,
        files: Files,
        *,
        bytes_max: int,
        timeout_s: float,
        private_allowed: bool,
        room: Room | None = None,
    ) -> None:
        self._room = room
        self._blobs = blobs
        self._files = files
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._private_allowed = private_allowed
        self._storing = asyncio.Semaphore(LARGE_BODIES_MAX)
        self._free = asyncio.Semaphore(CONCURRENCY)
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=False,
            # A connection whose certificate was verified for one name must not serve another.
            limits=httpx.Limits(max_keepalive_connections=0),
            # Cookies set for one client's URL must not be sent to another's.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            headers={
                "User-Agent": "Tollgate-Fetch",
                "Accept": "image/*, video/*, audio/*",
                # Compressed bodies could bypass the limit on bytes.
                "Accept-Encoding": "identity",
            },
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(
        self, account_id: int, request_id: RequestId, sources: Sequence[Source]
    ) -> tuple[BlobRef, ...]:
        """Store a request's attachments, in order. Raise ``TollgateError``."""
        if self._room is not None:
            await self._room.check_disk(FREE_BYTES_MIN)
        nonce = f"{INPUT_PREFIX}{secrets.token_hex(8)}"

        async def bring(place: int, source: Source) -> BlobRef:
            key = blob_key(str(account_id), request_id, nonce, place)
            return await self._ingest(account_id, key, source)

        spool = SPOOL.get()
        try:
            # The wait for other large bodies does not count towards the time limit.
            async with (
                self._storing if spool is not None else contextlib.nullcontext(),
                asyncio.timeout(self._timeout_s),
                asyncio.TaskGroup() as group,
            ):
                tasks = [
                    group.create_task(bring(place, source)) for place, source in enumerate(sources)
                ]
        except TimeoutError:
            raise InvalidRequest(
                "source_unreachable",
                f"The attachments could not be read within {self._timeout_s:g} s.",
                param=sources[0].param,
            ) from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if spool is not None:
            spool.close()  # the body's files are stored, so free their disk space
        return tuple(task.result() for task in tasks)

    async def _ingest(self, account_id: int, key: str, source: Source) -> BlobRef:
        if isinstance(source.given, StoredVoice):
            assert source.given.blob is not None, "voices are looked up before"
            return source.given.blob
        try:
            if isinstance(source.given, RemoteSource):
                async with self._free:
                    return await self._store(key, self._download(account_id, source), source)
            chunks = await self._open(account_id, source)
            return await self._store(key, chunks, source)
        except BlobMissing:
            raise InvalidRequest(
                "source_gone", f"{source.param} has been deleted.", param=source.param
            ) from None
        except BlobError:
            raise Unavailable(
                "blobs_unavailable", "The blob store does not respond.", retry_after_s=2
            ) from None

    async def _open(self, account_id: int, source: Source) -> AsyncIterator[bytes]:
        param = source.param
        match source.given:
            case InlineSource(uri) if (spool := SPOOL.get()) and (part := spool.find(uri)):
                if not part.valid:
                    raise _not_base64(param)
                return spool.read(part)
            case InlineSource(uri):
                return _pieces(
                    await asyncio.to_thread(decode, uri, source, self._bytes_max_of(source))
                )
            case UploadedSource(file_id):
                return self._files.content(await self._files.find(account_id, file_id, param=param))
            case SentSource(read):
                return read()
            case StoredSource(blob):
                return self._blobs.stream(blob)
        raise AssertionError(f"{source.given!r} is read from elsewhere")

    def _bytes_max_of(self, source: Source) -> int:
        """Return the maximum size of an attachment, in bytes."""
        return min(self._bytes_max, source.bytes_max or self._bytes_max)

    async def _store(self, key: str, chunks: AsyncIterator[bytes], source: Source) -> BlobRef:
        most = self._bytes_max_of(source)
        chunks = limit_bytes(chunks, most, _too_large(source, most))
        content_type, whole = await identify(chunks, source.kind, source.param)
        return await self._blobs.put_stream(key, whole, content_type=content_type)

    async def _download(self, account_id: int, source: Source) -> AsyncIterator[bytes]:
        assert isinstance(source.given, RemoteSource)
        url, param = source.given.url, source.param
        try:
            for _ in range(REDIRECTS_MAX + 1):
                check_public_url(url, param=param, private_allowed=self._private_allowed)
                to = await pin(url, private_allowed=self._private_allowed, owner=str(account_id))
                async with self._client.stream(
                    "GET", to.url, headers=to.headers, extensions=to.extensions
                ) as answer:
                    if answer.has_redirect_location:
                        url = urljoin(url, answer.headers["location"]).partition("#")[0]
                        continue
                    if answer.status_code != 200:
                        raise _unreachable(param, f"status {answer.status_code}")
                    async for chunk in answer.aiter_raw(CHUNK_BYTES):
                        yield chunk
                    return
        except (PrivateAddress, httpx.HTTPError, httpx.InvalidURL, OSError):
            # The same message for all, so that it does not reveal internal names and ports.
            raise _unreachable(
                param, "its address is not public, or its server does not respond"
            ) from None
        raise _unreachable(param, f"more than {REDIRECTS_MAX} redirects")


def decode(uri: str, source: Source, bytes_max: int) -> bytes:
    """Read a data URI. Raise ``InvalidRequest``, or ``TooLarge`` before it is decoded."""
    param = source.param
    head, comma, body = uri.partition(",")
    if not comma:
        raise InvalidRequest(
            "invalid_value",
            f"{param} is not a data URI of the form data:image/png;base64,….",
            param=param,
        )
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    if len(body) > bytes_max * 4 // 3 + 4:
        raise _too_large(source, bytes_max)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise _not_base64(param) from None


async def identify(
    chunks: AsyncIterator[bytes], kind: MediumKind | None, param: str
) -> tuple[str, AsyncIterator[bytes]]:
    """Return the content type of a file and its chunks, from the first byte.

    Raise ``InvalidRequest`` if it is not of ``kind``; None accepts every supported kind.
    """
    head = b""
    async for chunk in chunks:
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    if not head:
        raise InvalidRequest("empty_file", f"{param} is empty.", param=param)
    content_type = sniff(head)
    if content_type is None or (kind is not None and not can_contain(content_type, kind)):
        wanted: tuple[MediumKind, ...] = (kind,) if kind else ("image", "video", "audio")
        raise InvalidRequest(
            "unsupported_media_type",
            f"{param} has {content_type or 'an unknown type'}; accepted: "
            f"{', '.join(map(accepted_types, wanted))}.",
            param=param,
        )
    return content_type, _resumed(head, chunks)


async def limit_bytes(
    chunks: AsyncIterator[bytes], bytes_max: int, refusal: TollgateError
) -> AsyncIterator[bytes]:
    """Yield chunks of at most ``bytes_max`` bytes together. Raise ``refusal`` if there are more."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > bytes_max:
            raise refusal
        yield chunk


async def _resumed(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for chunk in rest:
        yield chunk


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _not_base64(param: str) -> TollgateError:
    return InvalidRequest(
        "invalid_value", f"{param} is a data URI with invalid base64.", param=param
    )


def _too_large(source: Source, bytes_max: int) -> TollgateError:
    message = f"{source.param} has more than {bytes_max} bytes"
    is_share = bytes_max == source.bytes_max != source.together_bytes_max
    if is_share and source.together_bytes_max is not None:
        message += f", its share of the {source.together_bytes_max} for all {source.kind}s together"
    return TooLarge("source_too_large", f"{message}.", param=source.param)


def _unreachable(param: str, why: str) -> TollgateError:
    return InvalidRequest("source_unreachable", f"{param} could not be read: {why}.", param=param)
