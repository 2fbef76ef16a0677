"""Asks upstreams what they publish about the models that the catalog sells.

Only GMI Cloud's request queue publishes contracts and prices. Nothing is ordered: each model is one
GET. The credential is read from the environment under the name that the entry gives, is sent to the
entry's own URL only, and is never logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gateway.catalog.market.published import differences
from gateway.catalog.problems import Level
from gateway.catalog.schema import CatalogEntry

PREFIX: Final = "/api/v1/ie/requestqueue/apikey"
TIMEOUT_S: Final = 20.0
CONCURRENT: Final = 4
BODY_BYTES_MAX: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UpstreamFinding:
    """A difference between the catalog and what an upstream publishes."""

    model: str
    level: Level
    message: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about one entry."""

    model: str
    url: str
    credential: str


def questions(entries: Iterable[CatalogEntry]) -> list[Question]:
    """Return what can be asked about the models that other services run."""
    return [
        Question(
            entry.name,
            f"{entry.upstream.url.rstrip('/')}{PREFIX}/models/{entry.upstream.model or entry.name}",
            entry.upstream.credential,
        )
        for entry in entries
        if entry.upstream is not None
        and entry.upstream.dialect == "gmi"
        and entry.upstream.url is not None
        and entry.upstream.credential is not None
    ]


async def check_upstreams(
    entries: Sequence[CatalogEntry], environ: Mapping[str, str]
) -> tuple[list[UpstreamFinding], int]:
    """Compare entries whose credential is set; return findings and the number of models asked."""
    by_name = {entry.name: entry for entry in entries}
    asked = [one for one in questions(entries) if environ.get(one.credential)]
    slots = asyncio.Semaphore(CONCURRENT)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client:

        async def ask(question: Question) -> list[UpstreamFinding]:
            async with slots:
                return await _ask(
                    client, question, by_name[question.model], environ[question.credential]
                )

        answers = await asyncio.gather(*map(ask, asked))
    return [finding for found in answers for finding in found], len(asked)


async def _ask(
    client: httpx.AsyncClient, question: Question, entry: CatalogEntry, credential: str
) -> list[UpstreamFinding]:
    name = entry.name
    try:
        response = await client.get(question.url, headers={"Authorization": f"Bearer {credential}"})
    except httpx.HTTPError as error:
        message = f"the upstream could not be asked: {type(error).__name__}"
        return [UpstreamFinding(name, "warning", message)]
    if response.status_code == httpx.codes.NOT_FOUND:
        message = "the upstream does not have this model, or not for this account"
        return [UpstreamFinding(name, "error", message)]
    if response.status_code != httpx.codes.OK or len(response.content) > BODY_BYTES_MAX:
        message = f"the upstream could not be asked: status {response.status_code}"
        return [UpstreamFinding(name, "warning", message)]
    try:
        model: Any = response.json()
    except ValueError:
        model = None
    if not isinstance(model, dict):
        return [UpstreamFinding(name, "warning", "the upstream's answer is not a JSON object")]
    return [UpstreamFinding(name, level, message) for level, message in differences(entry, model)]
