"""The check of a batch's file: every line, before any is run, as the live endpoint would check it.

Reads, holds nothing and charges nothing.
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
from gateway.errors import InternalError, InvalidRequest, TollgateError, Unavailable
from gateway.requests.service import Requests
from gateway.settings import Settings

ERRORS_MAX: Final = 100
"""Mistakes of one file that are told."""
LINE_BYTES_MAX: Final = 2**40
"""Of a line that has been checked: no bound, for the one it was checked by may have changed."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a file has in it; ``model`` is None where its lines name several."""

    total: int
    model: str | None
    mistakes: Sequence[Mapping[str, Any]]


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

    async def file(self, copy: IO[bytes], stopping: asyncio.Event) -> CheckReport:
        """Check a whole file, or as much as there is time for before it is to stop.

        Raise ``Unavailable`` while prices are not known.
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
        return CheckReport(total, model, mistakes[:ERRORS_MAX])

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
        """Raise ``TollgateError`` that says what is wrong with a line."""
        placed = read_line(
            line, self._endpoint, self._requests.entry, bytes_max=self._body_bytes_max
        )
        if placed.custom_id in self._custom_ids:
            raise InvalidRequest(
                "duplicate_custom_id",
                f"The custom_id {placed.custom_id!r} was used by a line before.",
                param="custom_id",
            )
        self._custom_ids.add(placed.custom_id)
        submission = submission_of(self._batch, self._endpoint, placed, line.number, 0)
        try:
            quoted = self._requests.check(submission, self._batch.account_id)
        except TollgateError as error:
            raise within_body(error) from None
        self._models.add(quoted.entry.name)


async def lines_of(
    copy: IO[bytes], bytes_max: int = LINE_BYTES_MAX
) -> AsyncIterator[list[BatchLine]]:
    """Read lines, some at a time, without keeping the event loop."""
    found: Iterator[list[BatchLine]] = pages(copy, bytes_max)
    while (page := await asyncio.to_thread(next, found, None)) is not None:
        yield page


def mistake(
    line: int | None, code: str, message: str, param: str | None = None
) -> Mapping[str, Any]:
    """One of OpenAI's errors of a batch."""
    return {"code": code, "line": line, "message": message, "param": param}
