"""Checks a file before a batch is made of it: its mistakes, and the most that it can cost.

Nothing is written. A large file is checked as far as there is time; the rest when the batch runs.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import IO, Final

import msgspec

from gateway.batches.check import Check, CheckReport, lines_of, mistake
from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.store import Batch, NewBatch
from gateway.checks.decoding import decode_json
from gateway.files.store import File, Files
from gateway.ids import new_id
from gateway.requests.service import Requests
from gateway.settings import Settings

PATIENCE_S: Final = 10.0
"""Time for which a file is checked while a person waits."""
WINDOW: Final = "24h"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a batch of a file would be; ``endpoint`` is None if its first line names none of ours.

    ``whole``: whether all lines were checked.
    """

    endpoint: str | None
    report: CheckReport
    whole: bool


async def try_file(
    file: File,
    *,
    key_id: int,
    now: datetime,
    files: Files,
    endpoints: Mapping[str, BatchEndpoint],
    requests: Requests,
    settings: Settings,
) -> Trial:
    """Check a file as a batch would. Raise ``BlobError``, or ``Unavailable``."""
    stopping = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(PATIENCE_S, stopping.set)
    try:
        with tempfile.TemporaryFile() as copy:
            async for chunk in files.content(file):
                await asyncio.to_thread(copy.write, chunk)
            path = await _endpoint_of(copy)
            if path not in endpoints:
                accepted = ", ".join(sorted(endpoints))
                wrong = f"url is {path!r}; accepted: {accepted}." if path else "No line has a url."
                report = CheckReport(0, None, [mistake(1, "mismatched_url", wrong, "url")])
                return Trial(None, report, whole=True)
            new = NewBatch(file.account_id, key_id, path, file.id, WINDOW, None, None)
            window = timedelta(seconds=settings.batch_window_s)
            batch = draft(new, now=now, window=window)
            check = Check(batch, endpoints[path], requests=requests, settings=settings)
            report = await check.file(copy, stopping)
            return Trial(path, report, whole=not stopping.is_set())
    finally:
        timer.cancel()


async def _endpoint_of(copy: IO[bytes]) -> str:
    """Return the URL of the first line; empty if it has none."""
    async for page in lines_of(copy):
        for line in page:
            try:
                value = decode_json(line.text or b"")
            except msgspec.DecodeError:
                value = None
            url = value.get("url") if isinstance(value, dict) else None
            return url if isinstance(url, str) else ""
    return ""


def draft(new: NewBatch, *, now: datetime, window: timedelta) -> Batch:
    """Return a batch as it would be created now, to check its file. It has no row."""
    return Batch(
        id=new_id("batch_"),
        account_id=new.account_id,
        key_id=new.key_id,
        endpoint=new.endpoint,
        input_file_id=new.input_file_id,
        completion_window=new.completion_window,
        metadata=new.metadata,
        status="validating",
        model=None,
        total=0,
        completed=0,
        failed=0,
        input_tokens=0,
        cached_input_tokens=0,
        output_tokens=0,
        cost_nanos=0,
        most_nanos=None,
        errors=None,
        ending=None,
        output_file_id=None,
        error_file_id=None,
        output_expires_s=new.output_expires_s,
        created_at=now,
        expires_at=now + window,
        in_progress_at=None,
        finalizing_at=None,
        cancelling_at=None,
        ended_at=None,
        lease_token=None,
        lease_until=None,
    )
