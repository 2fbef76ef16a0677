"""Tallies what events have delivered, which is the basis for charging incomplete requests.

Tokens, audio and full-size images count as delivered, however the request ended afterwards. Hosts
tally the events that they forward; the settler tallies the event log if nothing else is left of an
attempt. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from workers.contract.jobs import AudioChunk, BlobRef, Event, Preview, Tokens, Usage
from workers.contract.media import Medium

NOTHING: Final = Usage()


class Tally:
    """Delivery of one attempt: tokens, audio, and full-size previews."""

    __slots__ = ("_audio_ms", "_characters", "_input", "_previews", "_tokens", "_unemitted")

    def __init__(self) -> None:
        self._tokens = 0
        self._unemitted = 0
        self._input: Usage = NOTHING
        self._audio_ms: dict[int, int] = {}
        self._characters = 0
        self._previews: set[int] = set()

    def record(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._unemitted += event.count
            if event.text or event.reasoning or event.tool_calls or event.logprobs:
                # Tokens can be held back, such as those of an incomplete tool call.
                self._tokens, self._unemitted = self._tokens + self._unemitted, 0
            if event.usage is not None:
                self._input = event.usage
        elif isinstance(event, AudioChunk):
            if event.data:
                self._audio_ms[event.index] = event.duration_ms
                self._characters = max(self._characters, event.characters)
        elif isinstance(event, Preview) and event.full:
            self._previews.add(event.output)

    @property
    def has_delivered(self) -> bool:
        """Whether anything was delivered."""
        return bool(self._tokens or self._audio_ms or self._previews)

    def usage(self) -> Usage:
        """Return the quantities delivered; ``NOTHING`` without any delivery."""
        if not self.has_delivered:
            return NOTHING
        return Usage(
            requests=1,
            input_tokens=self._input.input_tokens,
            cached_input_tokens=self._input.cached_input_tokens,
            output_tokens=self._tokens,
            images=len(self._previews),
            audio_ms=sum(self._audio_ms.values()) or self._input.audio_ms,
            characters=self._characters,
        )


def preview_media(previews: Mapping[int, BlobRef]) -> tuple[list[Any], tuple[BlobRef, ...]]:
    """Return the last preview of each output as the media of a request that ended early."""
    media = [
        Medium("image", index, place, "preview", previews[index].content_type)
        for place, index in enumerate(sorted(previews))
    ]
    return msgspec.to_builtins(media), tuple(previews[index] for index in sorted(previews))


def combine_attempts(deliveries: Iterable[Usage]) -> Usage:
    """Return what several attempts delivered together: the maximum of each quantity, because every
    attempt repeats the first from its beginning."""
    found = NOTHING
    for one in deliveries:
        if one.requests:
            images = max(one.images, found.images)
            found = msgspec.structs.replace(chargeable(one, found), images=images)
    return found


def chargeable(measured: Usage, delivered: Usage) -> Usage:
    """Return the usage to charge for a request that delivered something but did not complete.

    ``measured`` can be more than was delivered, such as finished images that were not sent, or
    less, if the attempt that delivered was lost.
    """
    # A prompt is charged once. The cached part of it can differ between two attempts, so their
    # counts must not be mixed.
    known = measured.input_tokens + measured.cached_input_tokens
    read = measured if known else delivered
    return msgspec.structs.replace(
        measured,
        requests=1,
        input_tokens=read.input_tokens,
        cached_input_tokens=read.cached_input_tokens,
        output_tokens=max(measured.output_tokens, delivered.output_tokens),
        images=delivered.images,
        video_ms=0,
        audio_ms=max(measured.audio_ms, delivered.audio_ms),
        characters=max(measured.characters, delivered.characters),
    )
