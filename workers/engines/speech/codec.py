"""Decodes codec tokens to audio while a model still generates them.

A codec decodes a sentence as a whole: the audio of a frame can depend on all frames before it, and
on some after it. The lookahead of each codec is measured when it is loaded. Audio is final once
that many more frames exist, so the chunks of a stream equal the samples of the complete sentence,
without any crossfade. Each decoding starts at the beginning, but only after the number of frames
has doubled, so the total work is about twice that of one decoding, and a listener waits for no
chunk if frames are generated faster than they are played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

EmitAudio: TypeAlias = Callable[[torch.Tensor], None]
"""Callback that takes audio ``(N,)`` of any dtype and device, as soon as it is final."""
Decode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Decodes codec tokens ``(K, T)`` int64 to audio ``(N,)`` float32."""

_PROBE_FRAMES: Final = 48
_LOOKAHEAD_MAX: Final = 32
"""Maximum lookahead for streaming; otherwise audio is decoded once, at the end."""
_TOLERANCE: Final = 1e-5
"""Relative to the loudest sample."""
_FIRST_S: Final = 0.25
_GROWTH: Final = 2.0


@dataclass(frozen=True, slots=True)
class Codec:
    """``hop``: samples per frame. ``lookahead``: later frames on which a frame's audio depends,
    None if unbounded."""

    decode: Decode
    hop: int
    frames_per_second: float
    lookahead: int | None

    def frames(self, seconds: float) -> int:
        """Return the number of frames in a duration, at least one."""
        return max(1, math.floor(seconds * self.frames_per_second + 1e-6))


def measure_codec(decode: Decode, *, codebooks: int, size: int, rate: int) -> Codec:
    """Measure hop and lookahead: decode random tokens and their first half, and compare."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, size, (codebooks, 2 * _PROBE_FRAMES), generator=generator)
    with torch.no_grad():
        audio, first_half = decode(codes).float(), decode(codes[:, :_PROBE_FRAMES]).float()
    hop = round(len(audio) / (2 * _PROBE_FRAMES))
    common = min(len(first_half), _PROBE_FRAMES * hop)
    differing = (
        (audio[:common] - first_half[:common]).abs() > _TOLERANCE * audio.abs().max()
    ).nonzero()
    final_frames = int(differing[0]) // hop if len(differing) else common // hop
    lookahead = _PROBE_FRAMES - final_frames
    return Codec(decode, hop, rate / hop, lookahead if lookahead <= _LOOKAHEAD_MAX else None)


class StreamingDecoder:
    """Receives the tokens of each step, and emits final audio.

    ``delays``: steps by which each codebook lags behind its frame. ``is_end``: whether a step's
    tokens ``(K,)`` mark the end, after which no frame follows.
    """

    def __init__(
        self,
        codec: Codec,
        emit: EmitAudio,
        *,
        delays: Sequence[int],
        is_end: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._codec = codec
        self._emit = emit
        self._delays = tuple(delays)
        self._is_end = is_end
        self._steps: list[torch.Tensor] = []
        self._end: int | None = None
        self._emitted = 0
        self._next_frames = codec.frames(_FIRST_S)

    def put(self, value: torch.Tensor) -> None:
        """Add a step's tokens ``(K,)``."""
        step = value.reshape(-1).long()
        if self._end is None and self._is_end(step):
            self._end = len(self._steps)
        self._steps.append(step)
        lookahead = self._codec.lookahead
        if lookahead is not None and self.frames - lookahead >= self._next_frames:
            self._next_frames = max(self._next_frames + 1, math.ceil(_GROWTH * self._next_frames))
            self._emit_until(self._codec.decode(self.codes()), self.frames - lookahead)

    @property
    def ended(self) -> bool:
        """Whether all frames before the end are complete."""
        return self._end is not None and self.frames == self._end

    @property
    def frames(self) -> int:
        """Number of frames with all their tokens."""
        complete = max(0, len(self._steps) - max(self._delays))
        return complete if self._end is None else min(complete, self._end)

    def codes(self) -> torch.Tensor:
        """Return the tokens of complete frames ``(K, T)``."""
        table, frames = torch.stack(self._steps), self.frames
        rows = [table[delay : delay + frames, k] for k, delay in enumerate(self._delays)]
        return torch.stack(rows)

    def finish(self) -> None:
        """Emit the rest."""
        if self.frames * self._codec.hop > self._emitted:
            self._emit(self._codec.decode(self.codes())[self._emitted :])

    def _emit_until(self, audio: torch.Tensor, frames: int) -> None:
        end = frames * self._codec.hop
        self._emit(audio[self._emitted : end])
        self._emitted = end
