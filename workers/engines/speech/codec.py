"""Sound from a codec's codes while a model still writes them.

A codec decodes a sentence as a whole: what is heard of a frame may depend on frames behind it, and
on all before it. How far ahead it looks is measured on each codec as it is loaded. So the beginning
of a sentence is final as soon as that many more frames are there, and the pieces that are said one
after the other are the samples of the whole, with nothing to be faded over. The whole beginning is
decoded each time, but only when half as much again has been written: all in all three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from workers.engines.speech.model import EmitAudio

Decode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Codes ``(K, T)`` int64 to sound ``(N,)`` float32."""

_PROBE_FRAMES: Final = 48
_LOOKAHEAD_MAX: Final = 32
"""A codec that looks further ahead is decoded once, at the end."""
_TOLERANCE: Final = 1e-5
"""Of the loudest sample."""
_FIRST_S: Final = 0.25
_GROWTH: Final = 1.5


@dataclass(frozen=True, slots=True)
class Codec:
    """``hop``: samples of a frame. ``ahead``: frames that decide on one before them; None if all
    may."""

    decode: Decode
    hop: int
    frames_per_second: float
    lookahead: int | None

    def frames(self, seconds: float) -> int:
        """Of so much sound, at least one."""
        return max(1, math.floor(seconds * self.frames_per_second + 1e-6))


def measure_codec(decode: Decode, *, codebooks: int, size: int, rate: int) -> Codec:
    """Decode codes by chance, half of them and all, and see from where on the halves differ."""
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
    """Takes codes from a model of transformers as its ``streamer``, and says what is final.

    ``delays``: by how many steps each of the codebooks is written later than its frame.
    ``ends``: whether a step's codes ``(K,)`` belong to no frame any more, nor do any behind them.
    ``prompted``: whether the prompt is known to have passed; otherwise it is what comes first.
    """

    def __init__(
        self,
        codec: Codec,
        emit: EmitAudio,
        *,
        delays: Sequence[int],
        is_end: Callable[[torch.Tensor], bool] = lambda _: False,
        prompt_skipped: bool = False,
    ) -> None:
        self._codec = codec
        self._emit = emit
        self._delays = tuple(delays)
        self._is_end = is_end
        self._steps: list[torch.Tensor] = []
        self._prompt_skipped = prompt_skipped
        self._end: int | None = None
        self._emitted = 0
        self._next_frames = codec.frames(_FIRST_S)

    def put(self, value: torch.Tensor) -> None:
        """Take a step's codes ``(K,)``."""
        if not self._prompt_skipped:
            self._prompt_skipped = True
            return
        step = value.reshape(-1).long()
        if self._end is None and self._is_end(step):
            self._end = len(self._steps)
        self._steps.append(step)
        lookahead = self._codec.lookahead
        if lookahead is not None and self.frames - lookahead >= self._next_frames:
            self._next_frames = max(self._next_frames + 1, math.ceil(_GROWTH * self._next_frames))
            self._emit_until(self._codec.decode(self.codes()), self.frames - lookahead)

    def end(self) -> None:
        """Part of the protocol; a family says itself when all is written."""

    @property
    def frames(self) -> int:
        """Whose codes have all been written."""
        complete = max(0, len(self._steps) - max(self._delays))
        return complete if self._end is None else min(complete, self._end)

    def codes(self) -> torch.Tensor:
        """``(K, T)``"""
        table, frames = torch.stack(self._steps), self.frames
        rows = [table[delay : delay + frames, k] for k, delay in enumerate(self._delays)]
        return torch.stack(rows)

    def finish(self, audio: torch.Tensor | None = None) -> None:
        """Say the rest. ``whole``: what all codes decode to, if that is known."""
        if audio is None:
            if not self.frames:
                return
            audio = self._codec.decode(self.codes())
        self._emit(audio[self._emitted :])

    def _emit_until(self, audio: torch.Tensor, frames: int) -> None:
        end = frames * self._codec.hop
        self._emit(audio[self._emitted : end])
        self._emitted = end
