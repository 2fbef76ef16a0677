"""Downloads outputs from an upstream and uploads source files to it, within limits.

The URLs come from the upstream. They are called without our credential, over TLS and never inside
our network, unless the upstream itself is called without TLS, as is possible within our network.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import IO, Final, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx
import tenacity

from workers.contract.addresses import Pinned, PrivateAddress, pin
from workers.contract.kinds import HEAD_BYTES, sniff
from workers.contract.media import File

BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size of all outputs of one request."""
TRANSFER_S: Final = 300.0
MEMORY_BYTES_MAX: Final = 1024 * 1024
"""Size of a download from which on it is collected in a temporary file."""
REDIRECTS_MAX: Final = 3
ATTEMPTS: Final = 4


class TransferError(Exception):
    """A transfer failed; the message contains the reason, but not the URL."""


class _TransientError(TransferError):
    """A failure that can be retried."""


@dataclass(slots=True)
class ByteBudget:
    """Number of bytes that can still be downloaded for a request."""

    left: int = BYTES_MAX

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TransferError(f"it exceeds the limit of {BYTES_MAX} bytes")


class Transfers:
    """Connections to file hosts, shared by all jobs of an entry."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._http = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=httpx.Timeout(60.0, connect=connect_timeout_s, pool=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def fetch(self, url: str, budget: ByteBudget, *, plain_allowed: bool) -> File:
        """Download an image, a video or audio. Raise ``TransferError``."""
        return await _with_retries(lambda: self._fetch(url, budget, plain_allowed=plain_allowed))

    async def upload(self, url: str, file: File, *, plain_allowed: bool) -> None:
        """Upload a file to a URL that was signed for its type. Raise ``TransferError``."""
        await _with_retries(lambda: self._upload(url, file, plain_allowed=plain_allowed))

    async def _fetch(self, url: str, budget: ByteBudget, *, plain_allowed: bool) -> File:
        # Collected in a file: a growing buffer would need twice the memory at the end.
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX) as data:
            content_type = await self._fetch_into(data, url, budget, plain_allowed=plain_allowed)
            data.seek(0)
            return File(content_type, await asyncio.to_thread(data.read))

    async def _fetch_into(
        self, data: IO[bytes], url: str, budget: ByteBudget, *, plain_allowed: bool
    ) -> str:
        """Download a URL into ``data``. Return its content type."""
        fetched = 0
        try:
            for _ in range(REDIRECTS_MAX + 1):
                to = await _checked(url, plain_allowed=plain_allowed)
                async with self._http.stream(
                    "GET", to.url, headers=to.headers, extensions=to.extensions
                ) as response:
                    if response.has_redirect_location:
                        url = urljoin(url, response.headers["Location"])
                        continue
                    _check_status(response.status_code)
                    async for chunk in response.aiter_bytes():
                        fetched += len(chunk)
                        budget.take(len(chunk))
                        data.write(chunk)
                    header = response.headers.get("Content-Type", "")
                    data.seek(0)
                    return _content_type(data.read(HEAD_BYTES), header)
        except httpx.HTTPError as error:
            budget.left += fetched
            raise _TransientError(f"the connection was lost ({type(error).__name__})") from error
        except ValueError as error:
            raise TransferError("it was redirected to an invalid URL") from error
        raise TransferError(f"more than {REDIRECTS_MAX} redirects")

    async def _upload(self, url: str, file: File, *, plain_allowed: bool) -> None:
        to = await _checked(url, plain_allowed=plain_allowed)
        try:
            response = await self._http.put(
                to.url,
                content=file.data,
                headers={**to.headers, "Content-Type": file.content_type},
                extensions=to.extensions,
            )
        except httpx.HTTPError as error:
            raise _TransientError(f"the connection was lost ({type(error).__name__})") from error
        _check_status(response.status_code)


_T = TypeVar("_T")


async def _with_retries(attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Retry a transfer, for at most ``TRANSFER_S``. Uploads and downloads are idempotent."""

    async def once() -> _T:
        return await attempt()

    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
        retry=tenacity.retry_if_exception_type(_TransientError),
        reraise=True,
    )
    try:
        async with asyncio.timeout(TRANSFER_S):
            return await retrying(once)
    except TimeoutError:
        raise TransferError(f"it took more than {TRANSFER_S:g} s") from None


async def _checked(url: str, *, plain_allowed: bool) -> Pinned:
    """Check and resolve a URL."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        raise TransferError("its URL is invalid") from None
    if scheme != "https" and not (plain_allowed and scheme == "http"):
        raise TransferError(f"its URL has the scheme {scheme[:20]!r}, not https")
    try:
        return await pin(url, private_allowed=plain_allowed)
    except PrivateAddress:
        raise TransferError("its host is not public") from None
    except OSError as error:
        raise _TransientError("its host cannot be resolved") from error


def _check_status(status: int) -> None:
    if status == httpx.codes.TOO_MANY_REQUESTS or status >= 500:
        raise _TransientError(f"the response has status {status}")
    if not 200 <= status < 300:
        raise TransferError(f"the response has status {status}")


def _content_type(head: bytes, header: str) -> str:
    """Detect the type by the first bytes: many hosts send ``application/octet-stream``."""
    content_type = sniff(head)
    if content_type is None:
        stated = header.partition(";")[0].strip().lower()[:60]
        raise TransferError(f"it is {stated or 'of unknown type'}, not an image, video or audio")
    return content_type
