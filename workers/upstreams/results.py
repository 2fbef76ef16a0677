"""Fetches and describes the media of an upstream request. Knows no endpoint and no credential."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from workers.contract.jobs import Completed, Failed, Job, Usage
from workers.contract.media import File, Medium, characters
from workers.media.measure import MediaProperties, measure
from workers.upstreams import gmi_wire as wire
from workers.upstreams.transfers import ByteBudget, TransferError, Transfers


async def collect(
    job: Job, outcome: Mapping[str, Any], transfers: Transfers, *, plain_allowed: bool
) -> Completed | Failed:
    """Convert an upstream's result to an outcome.

    An output that cannot be fetched is described by its error and not charged. Without any output
    the job fails, except that the id of a voice is sufficient.
    """
    found = wire.find_media(outcome, wire.OUTPUT_KINDS[job.task])
    budget = ByteBudget()
    async with asyncio.TaskGroup() as group:
        fetches = [
            group.create_task(_fetch(transfers, one, budget, plain_allowed=plain_allowed))
            for one in found
        ]
    media: list[Medium] = []
    files: list[File] = []
    why, index = "it contains no media", 0
    for one, fetch in zip(found, fetches, strict=True):
        got = fetch.result()
        if not isinstance(got, str):
            file, measured = got
            media.append(_describe(one, index, len(files), file, measured, outcome))
            files.append(file)
        elif not one.is_thumbnail:
            why = got
            media.append(Medium(one.kind, index, error=f"It could not be fetched: {got}."))
        index += not one.is_thumbnail
    outputs = [one for one in media if one.role == "output" and one.blob is not None]
    if not outputs and (found or "voice_id" not in outcome):
        return Failed("upstream_error", f"The upstream's result could not be fetched: {why}.")
    output = {**wire.scalars(outcome), "media": media}
    return Completed(_usage_of(job, outputs), output=output, files=tuple(files))


async def _fetch(
    transfers: Transfers, one: wire.MediaUrl, budget: ByteBudget, *, plain_allowed: bool
) -> tuple[File, MediaProperties] | str:
    """Return a file and its measured properties, or the reason why it could not be fetched."""
    try:
        file = await transfers.fetch(one.url, budget, plain_allowed=plain_allowed)
    except TransferError as error:
        return str(error)
    return file, await asyncio.to_thread(measure, file.data, file.content_type)


def _describe(
    one: wire.MediaUrl,
    index: int,
    blob: int,
    file: File,
    measured: MediaProperties,
    outcome: Mapping[str, Any],
) -> Medium:
    kind = wire.kind_of(file.content_type)
    duration_ms, said_ms = measured.duration_ms, outcome.get("duration_ms")
    if not duration_ms and kind != "image" and isinstance(said_ms, int | float):
        duration_ms = max(0, round(said_ms))
    return Medium(
        kind,
        0 if one.is_thumbnail else index,
        blob=blob,
        role="thumbnail" if one.is_thumbnail else "output",
        content_type=file.content_type,
        width=measured.width,
        height=measured.height,
        duration_ms=duration_ms,
        fps=measured.fps,
    )


def _usage_of(job: Job, outputs: Sequence[Medium]) -> Usage:
    """Count the delivered units, at most as many as requested: 5.04 seconds of video are charged as
    5 if 5 were requested."""
    given, most = job.input, job.limits
    lengths = {"image": 0, "video": 0, "audio": 0}
    for one in outputs:
        lengths[one.kind] += one.duration_ms
    images = sum(one.kind == "image" for one in outputs)
    texts = [text for text in (given.get("text"), given.get("prompt")) if isinstance(text, str)]
    return Usage(
        requests=1,
        images=min(images, most.images),
        video_ms=min(lengths["video"], most.video_ms),
        audio_ms=min(lengths["audio"], most.audio_ms),
        characters=min(sum(map(characters, texts)), most.characters),
    )
