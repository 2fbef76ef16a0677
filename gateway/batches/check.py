"""Checks every line of a batch's file like the live endpoint, before any line is run.

Only reads: nothing is held or charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.lines import BatchLine, pages, read_line, within_body
from gateway.batches.names import submission_of
from gateway.batches.store import Batch
from gateway.errors import InternalError, InvalidRequest, TollgateError, Unavailable, rename
from gateway.requests.service import Requests
from gateway.settings import Settings

ERRORS_MAX: Final = 100
"""Maximum number of reported errors of a file."""
LINE_BYTES_MAX: Final = 2**40
"""Maximum size of a line that was already checked: unlimited, because the setting may have changed
since."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of checking a file; ``model`` is None if its lines name several."""

    total: int
    model: str | None
    mistakes: Sequence[Mapping[str, Any]]
    most_nanos: int = 0
    """Sum of the quotes of the lines without errors: the most that they can cost."""


class Check:
    def __init__(
        self, batch: Batch, endpoint: BatchEndpoint, *, requests: Requests, settings: Settings
    ) -> None:
        self._batch = batch
        self._endpoint = endpoint
        self._requests = requests
        self._settings = settings
        self._body_bytes_max = endpoint.body_bytes_max(settings)
        self._custom_ids: set[str] = set()
        self._models: set[str] = set()
        self._most_nanos = 0

    async def file(self, copy: IO[bytes], stopping: asyncio.Event) -> CheckReport:
        """Check a file until its end, ``ERRORS_MAX`` errors, or ``stopping``.

        Raise ``Unavailable`` if prices are unknown.
        """
        mistakes: list[Mapping[str, Any]] = []
        total = 0
        async for page in lines_of(copy, self._body_bytes_max):
            total += len(page)
            if total > self._settings.batch_lines_max:
                most = f"A batch has at most {self._settings.batch_lines_max} requests."
                return CheckReport(total, None, [mistake(None, "too_many_lines", most)])
            mistakes += await asyncio.to_thread(self._mistakes, page)
            if len(mistakes) >= ERRORS_MAX or stopping.is_set():
                break
        if not total:
            mistakes = [mistake(None, "empty_file", "The input file has no requests.")]
        model = min(self._models) if len(self._models) == 1 else None
        return CheckReport(total, model, mistakes[:ERRORS_MAX], self._most_nanos)

    def _mistakes(self, page: list[BatchLine]) -> list[Mapping[str, Any]]:
        found = []
        for line in page:
            try:
                self._line(line)
            except (Unavailable, InternalError):
                raise
            except TollgateError as error:
                found.append(mistake(line.number, error.code, error.message, error.param))
        return found

    def _line(self, line: BatchLine) -> None:
        """Check a line. Raise ``TollgateError``."""
        checked = read_line(
            line, self._endpoint, self._requests.quotes.find, bytes_max=self._body_bytes_max
        )
        if checked.custom_id in self._custom_ids:
            raise InvalidRequest(
                "duplicate_custom_id",
                f"The custom_id {checked.custom_id!r} was already used by an earlier line.",
                param="custom_id",
            )
        self._custom_ids.add(checked.custom_id)
        submission = submission_of(self._batch, self._endpoint, checked, line.number, 0)
        try:
            quoted = self._requests.quotes.check(submission, self._batch.account_id)
        except TollgateError as error:
            rename(error, self._endpoint.names)
            raise within_body(error) from None
        self._models.add(quoted.entry.name)
        self._most_nanos += quoted.bill.total_nanos


async def lines_of(
    copy: IO[bytes], bytes_max: int = LINE_BYTES_MAX
) -> AsyncIterator[list[BatchLine]]:
    """Read a file's lines in pages, without blocking the event loop."""
    found: Iterator[list[BatchLine]] = pages(copy, bytes_max)
    while (page := await asyncio.to_thread(next, found, None)) is not None:
        yield page


def mistake(
    line: int | None, code: str, message: str, param: str | None = None
) -> Mapping[str, Any]:
    """Return an error of a batch in OpenAI's format."""
    return {"code": code, "line": line, "message": message, "param": param}
