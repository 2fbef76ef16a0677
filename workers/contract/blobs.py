"""The blob store for large inputs and outputs, shared by all processes: a directory or S3.

A blob is written once, before the message that refers to it is sent, under a key that is used only
once: ``<account>/<request>/<nonce>/<n>``. Therefore a worker that lost its lease cannot overwrite
the blobs of its successor, and all blobs of a request can be deleted by prefix. A reference carries
size and SHA-256, and a blob that does not match its reference is never returned. Knows neither
queue nor SQL, nor the meaning of the bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, S3Store

from workers.contract.jobs import BlobRef

BYTES_MAX: Final = 256 * 1024 * 1024
CHUNK_BYTES: Final = 1024 * 1024
"""Chunk size of a streamed read; hashing one takes about a millisecond."""
HASHED_INLINE_BYTES: Final = 64 * 1024
"""Size up to which a blob is hashed on the event loop."""
PARTS_AT_ONCE: Final = 2
"""Concurrent parts of a streamed write; each takes 5 MiB of memory."""
STOPPED_WITHIN_S: Final = 5.0
"""Longest wait for the end of a cancelled write; only a store that does not respond takes it."""

_Store: TypeAlias = LocalStore | S3Store | MemoryStore
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class BlobError(Exception):
    """A blob could not be written or read.

    ├── BlobTooLarge     exceeds the store's limit; nothing was written
    ├── BlobMissing      the key does not exist, or no longer
    ├── BlobDamaged      the content does not match the reference
    └── BlobUnavailable  the store itself failed; can be retried
    """


class BlobTooLarge(BlobError):
    pass


class BlobMissing(BlobError):
    pass


class BlobDamaged(BlobError):
    pass


class BlobUnavailable(BlobError):
    pass


def blob_key(account: str, request_id: str, nonce: str, n: int) -> str:
    """Return the key of blob number ``n`` of one attempt.

    The nonce is the lease's token for an output and random for an input. Raise ``ValueError`` if a
    part is not a valid path segment.
    """
    parts = (account, request_id, nonce.replace(":", "-"), str(n))
    for part in parts:
        _check(part)
    return "/".join(parts)


class Blobs:
    """The store at ``url``: ``file:///directory``, ``s3://bucket/prefix`` or, for a single process,
    ``memory:///``.

    S3 is configured by the usual ``AWS_…`` environment variables (``AWS_ENDPOINT_URL`` for other
    vendors). Raise ``ValueError`` if the scheme is not supported.
    """

    def __init__(self, url: str, *, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._store: _Store
        self._directory: Path | None = None
        if url.startswith("file://"):
            self._directory = Path(unquote(urlsplit(url).path))
            self._store = LocalStore.from_url(url, mkdir=True, automatic_cleanup=True)
        elif url.startswith("s3://"):
            self._store = S3Store.from_url(url)
        elif url.startswith("memory://"):
            self._store = MemoryStore()
        else:
            scheme = url.partition(":")[0]
            raise ValueError(
                f"unsupported blob store {scheme!r}; use file:///directory or s3://bucket/prefix"
            )

    async def put(
        self, key: str, data: bytes, *, content_type: str = "application/octet-stream"
    ) -> BlobRef:
        """Write a blob. When this returns, every process can read it.

        When this is cancelled, the blob is written or not, and will not be written later: it can
        be deleted.
        """
        if len(data) > self._bytes_max:
            raise BlobTooLarge(f"{len(data)} bytes; the limit is {self._bytes_max}")
        # A thread costs as much as hashing some 64 KiB.
        small = len(data) <= HASHED_INLINE_BYTES
        digest = hashlib.sha256(data) if small else await asyncio.to_thread(hashlib.sha256, data)
        # A directory cannot store a content type; the reference carries it in any case.
        plain = isinstance(self._store, LocalStore)
        attributes = None if plain else {"Content-Type": content_type}
        with _translated(key):
            await _end_of(obstore.put_async(self._store, key, data, attributes=attributes))
        return BlobRef(key, len(data), digest.hexdigest(), content_type)

    async def put_stream(
        self,
        key: str,
        chunks: AsyncIterator[bytes],
        *,
        content_type: str = "application/octet-stream",
    ) -> BlobRef:
        """Like ``put``, for a stream of chunks of up to about a megabyte."""
        source = _Source(chunks, self._bytes_max)
        plain = isinstance(self._store, LocalStore)
        attributes = None if plain else {"Content-Type": content_type}
        with _translated(key):
            await _end_of(
                obstore.put_async(
                    self._store,
                    key,
                    source.read(),
                    attributes=attributes,
                    max_concurrency=PARTS_AT_ONCE,
                ),
                source.stop,
            )
        return BlobRef(key, source.size, source.digest.hexdigest(), content_type)

    async def get(self, ref: BlobRef) -> bytes:
        """Read and verify a blob."""
        return b"".join([chunk async for chunk in self.stream(ref)])

    async def stream(self, ref: BlobRef) -> AsyncIterator[bytes]:
        """Read a blob in chunks of about a megabyte.

        The size is checked before the first chunk, the SHA-256 after the last.
        """
        digest = hashlib.sha256()
        with _translated(ref.key):
            found = await obstore.get_async(self._store, ref.key)
            if found.meta["size"] != ref.bytes:
                raise BlobDamaged(f"{ref.key} has {found.meta['size']} bytes, not {ref.bytes}")
            chunks = found.stream(min_chunk_size=CHUNK_BYTES)
        while True:
            with _translated(ref.key):
                chunk = await anext(aiter(chunks), None)
            if chunk is None:
                break
            data = bytes(chunk)
            digest.update(data)
            yield data
        if digest.hexdigest() != ref.sha256:
            raise BlobDamaged(f"the SHA-256 of {ref.key} does not match its reference")

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete blobs; missing ones are ignored."""
        for key in keys:
            with _translated(key), suppress(FileNotFoundError):
                await obstore.delete_async(self._store, key)

    async def size(self, key: str) -> int:
        """Return the size of a blob by its key. Raise ``BlobMissing``."""
        with _translated(key):
            found = await obstore.head_async(self._store, key)
        return int(found["size"])

    async def stream_part(self, key: str, *, start: int, end: int) -> AsyncIterator[bytes]:
        """Read the bytes from ``start`` to ``end`` (exclusive). They are not verified."""
        with _translated(key):
            found = await obstore.get_async(self._store, key, options={"range": (start, end)})
            chunks = found.stream(min_chunk_size=CHUNK_BYTES)
        while True:
            with _translated(key):
                chunk = await anext(aiter(chunks), None)
            if chunk is None:
                break
            yield bytes(chunk)

    def open(self, key: str) -> io.RawIOBase:
        """Open a blob as a file, of which only the parts that are read are transferred. They are
        not verified. Blocks: use it in a thread. Raise ``BlobMissing``."""
        with _translated(key):
            return _BlobFile(self._store, key, int(obstore.head(self._store, key)["size"]))

    async def delete_request(
        self, account: str, request_id: str, *, spare: Collection[str] = ()
    ) -> int:
        """Delete all blobs of a request except those whose nonce starts with a prefix in ``spare``.
        Return their number."""
        prefix = f"{_check(account)}/{_check(request_id)}/"
        count = 0
        with _translated(prefix):
            async for batch in obstore.list(self._store, prefix):
                # Another process may be deleting the same request.
                for blob in batch:
                    nonce = blob["path"].removeprefix(prefix)
                    if any(nonce.startswith(each) for each in spare):
                        continue
                    try:
                        await obstore.delete_async(self._store, blob["path"])
                        count += 1
                    except FileNotFoundError:
                        continue
            if self._directory is not None:
                await asyncio.to_thread(_remove_unfinished, self._directory / prefix, spare)
        return count

    async def sign(self, ref: BlobRef, *, valid_s: int) -> str | None:
        """Return a presigned URL of a blob; None if the store does not support them."""
        if not isinstance(self._store, S3Store):
            return None
        with _translated(ref.key):
            return await obstore.sign_async(
                self._store, "GET", ref.key, expires_in=timedelta(seconds=valid_s)
            )


class _Source:
    """Chunks on their way to the store, which asks for each in a task of its own."""

    def __init__(self, chunks: AsyncIterator[bytes], bytes_max: int) -> None:
        self.size = 0
        self.digest = hashlib.sha256()
        self._chunks = chunks
        self._bytes_max = bytes_max
        self._step: asyncio.Task[Any] | None = None
        self._is_stopped = False

    async def read(self) -> AsyncIterator[bytes]:
        self._step = asyncio.current_task()
        async for chunk in self._chunks:
            self.size += len(chunk)
            if self.size > self._bytes_max:
                raise BlobTooLarge(f"more than the limit of {self._bytes_max} bytes")
            self.digest.update(chunk)
            yield chunk
            if self._is_stopped:
                raise asyncio.CancelledError
            self._step = asyncio.current_task()

    def stop(self) -> None:
        """End a read that is under way, and refuse the next."""
        self._is_stopped = True
        if self._step is not None:
            self._step.cancel()


class _BlobFile(io.RawIOBase):
    """A blob as a file that can be read at any position, for readers that need few parts of it."""

    def __init__(self, store: _Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        with _translated(self._key):
            part = obstore.get_range(self._store, self._key, start=self._at, length=length)
        buffer[:length] = bytes(part)
        self._at += length
        return length


async def _end_of(write: Awaitable[Any], stop: Callable[[], None] = lambda: None) -> None:
    """Wait for the end of a write, cancelled or not.

    The store's threads go on after a cancellation, and could write a blob that the caller has just
    deleted.
    """
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([writing], timeout=STOPPED_WITHIN_S)
        if not writing.cancel() and not writing.cancelled():
            writing.exception()  # read, so that asyncio does not report it
        raise


def _check(part: str) -> str:
    if not _SEGMENT.fullmatch(part):
        raise ValueError(f"{part!r} is not a valid part of a blob key")
    return part


def _remove_unfinished(folder: Path, spare: Collection[str]) -> None:
    """Remove unfinished files of killed processes, which the store does not list."""
    for nonce in folder.glob("*"):
        if any(nonce.name.startswith(each) for each in spare):
            continue
        for file in nonce.glob("*#*"):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            nonce.rmdir()
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Translate the store's errors. Its messages are dropped because they can contain host
    names."""
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissing(f"blob {key} does not exist") from error
    except (BaseError, OSError) as error:
        raise BlobUnavailable(f"{key}: {type(error).__name__}") from error
