"""Fetches and describes the media of an upstream request. Knows no endpoint and no credential."""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.contract.jobs import Completed, Job, Usage
from workers.contract.kinds import HEAD_BYTES, sniff
from workers.contract.media import File, Medium, MediumKind, characters
from workers.media.measure import MediaProperties, measure
from workers.upstreams import gmi_results as reading
from workers.upstreams import gmi_wire as wire
from workers.upstreams.transfers import ByteBudget, TransferError, Transfers


@dataclass(frozen=True, slots=True)
class Collected:
    """What could be read of a result. ``missing``: the reason if that is not all of it."""

    completed: Completed | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class _Fetched:
    found: reading.FoundMedium
    file: File
    measured: MediaProperties


async def collect(
    job: Job, outcome: Mapping[str, Any], transfers: Transfers, *, plain_allowed: bool
) -> Collected:
    """Convert an upstream's result to an outcome.

    An output that cannot be fetched is described by its error and not charged. Without any output
    there is no outcome, except that the id of a voice is sufficient.
    """
    wanted = wire.OUTPUT_KINDS[job.task]
    found = reading.find_media(outcome, wanted)
    budget = ByteBudget()
    async with asyncio.TaskGroup() as group:
        fetches = [
            group.create_task(_fetch(transfers, one, budget, plain_allowed=plain_allowed))
            for one in found
        ]
    results = [fetch.result() for fetch in fetches]
    missing = next(
        (
            one
            for one, of in zip(results, found, strict=True)
            if isinstance(one, str) and not of.is_thumbnail
        ),
        "",
    )
    media, files = _describe_all(results, found, wanted, outcome)
    outputs = [one for one in media if one.role == "output" and one.blob is not None]
    is_delivered = any(reading.is_output(one.content_type, wanted) for one in outputs)
    if not is_delivered and (found or "voice_id" not in outcome):
        return Collected(None, missing or f"it contains no {wanted}")
    output = {**reading.scalars(outcome), "media": media}
    usage = _usage_of(job, outputs)
    return Collected(Completed(usage, output=output, files=tuple(files)), missing)


def _describe_all(
    results: Sequence[_Fetched | str],
    found: Sequence[reading.FoundMedium],
    wanted: MediumKind,
    outcome: Mapping[str, Any],
) -> tuple[list[Medium], list[File]]:
    """Describe the outputs of the wanted kind, then the others, then thumbnails.

    A chain of models can return its intermediate pictures beside its video.
    """
    order = sorted(range(len(results)), key=lambda n: _rank(results[n], found[n], wanted))
    media: list[Medium] = []
    files: list[File] = []
    index = 0
    for place in order:
        got, one = results[place], found[place]
        if isinstance(got, str):
            if not one.is_thumbnail:
                media.append(Medium(one.kind, index, error=f"It could not be fetched: {got}."))
                index += 1
        elif not one.is_thumbnail:
            media.append(_describe(got, index, len(files), outcome))
            files.append(got.file)
            index += 1
        elif got.file.content_type.startswith("image/"):  # it can be the video itself
            media.append(_describe(got, 0, len(files), outcome))
            files.append(got.file)
    return media, files


def _rank(got: _Fetched | str, one: reading.FoundMedium, wanted: MediumKind) -> int:
    if one.is_thumbnail:
        return 2
    return int(not isinstance(got, str) and not reading.is_output(got.file.content_type, wanted))


async def _fetch(
    transfers: Transfers, one: reading.FoundMedium, budget: ByteBudget, *, plain_allowed: bool
) -> _Fetched | str:
    """Return a file and its measured properties, or the reason why it could not be fetched."""
    try:
        if one.data:
            file = await asyncio.to_thread(_decode, one.data, budget)
        else:
            file = await transfers.fetch(one.url, budget, plain_allowed=plain_allowed)
    except TransferError as error:
        return str(error)
    return _Fetched(one, file, await asyncio.to_thread(measure, file.data, file.content_type))


def _decode(text: str, budget: ByteBudget) -> File:
    """Decode a file that is part of the result. Raise ``TransferError``."""
    budget.take(len(text) * 3 // 4)
    try:
        data = b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise TransferError("it is not valid base64") from None
    content_type = sniff(data[:HEAD_BYTES])
    if content_type is None:
        raise TransferError("it is of unknown type, not an image, video or audio")
    return File(content_type, data)


def _describe(got: _Fetched, index: int, blob: int, outcome: Mapping[str, Any]) -> Medium:
    kind, measured = reading.kind_of(got.file.content_type), got.measured
    duration_ms, said_ms = measured.duration_ms, outcome.get("duration_ms")
    if not duration_ms and kind != "image" and isinstance(said_ms, int | float):
        duration_ms = max(0, round(said_ms))
    return Medium(
        kind,
        index,
        blob=blob,
        role="thumbnail" if got.found.is_thumbnail else "output",
        content_type=got.file.content_type,
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
