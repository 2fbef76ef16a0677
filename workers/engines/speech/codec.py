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

from workers.engines.speech.model import Say

Decode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Codes ``(K, T)`` int64 to sound ``(N,)`` float32."""

_PROBE_FRAMES: Final = 48
_AHEAD_MAX: Final = 32
"""A codec that looks further ahead is decoded once, at the end."""
_EQUAL: Final = 1e-5
"""Of the loudest sample."""
_FIRST_S: Final = 0.25
_GROWTH: Final = 1.5


@dataclass(frozen=True, slots=True)
class Codec:
    """``hop``: samples of a frame. ``ahead``: frames that decide on one before them; None if all
    may."""

    decode: Decode
    hop: int
    frames_a_second: float
    ahead: int | None

    def frames(self, seconds: float) -> int:
        """Of so much sound, at least one."""
        return max(1, math.floor(seconds * self.frames_a_second + 1e-6))


def measured(decode: Decode, *, codebooks: int, size: int, rate: int) -> Codec:
    """Decode codes by chance, half of them and all, and see from where on the halves differ."""
    chance = torch.Generator().manual_seed(0)
    codes = torch.randint(0, size, (codebooks, 2 * _PROBE_FRAMES), generator=chance)
    with torch.no_grad():
        whole, half = decode(codes).float(), decode(codes[:, :_PROBE_FRAMES]).float()
    hop = round(len(whole) / (2 * _PROBE_FRAMES))
    same = min(len(half), _PROBE_FRAMES * hop)
    apart = ((whole[:same] - half[:same]).abs() > _EQUAL * whole.abs().max()).nonzero()
    final = int(apart[0]) // hop if len(apart) else same // hop
    ahead = _PROBE_FRAMES - final
    return Codec(decode, hop, rate / hop, ahead if ahead <= _AHEAD_MAX else None)


class StreamingDecoder:
    """Takes codes from a model of transformers as its ``streamer``, and says what is final.

    ``delays``: by how many steps each of the codebooks is written later than its frame.
    ``ends``: whether a step's codes ``(K,)`` belong to no frame any more, nor do any behind them.
    ``prompted``: whether the prompt is known to have passed; otherwise it is what comes first.
    """

    def __init__(
        self,
        codec: Codec,
        say: Say,
        *,
        delays: Sequence[int],
        ends: Callable[[torch.Tensor], bool] = lambda _: False,
        prompted: bool = False,
    ) -> None:
        self._codec = codec
        self._say = say
        self._delays = tuple(delays)
        self._ends = ends
        self._written: list[torch.Tensor] = []
        self._prompted = prompted
        self._end: int | None = None
        self._sent = 0
        self._next = codec.frames(_FIRST_S)

    def put(self, value: torch.Tensor) -> None:
        """Take a step's codes ``(K,)``."""
        if not self._prompted:
            self._prompted = True
            return
        step = value.reshape(-1).long()
        if self._end is None and self._ends(step):
            self._end = len(self._written)
        self._written.append(step)
        ahead = self._codec.ahead
        if ahead is not None and self.frames - ahead >= self._next:
            self._next = max(self._next + 1, math.ceil(_GROWTH * self._next))
            self._pass_on(self._codec.decode(self.codes()), self.frames - ahead)

    def end(self) -> None:
        """Part of the protocol; a family says itself when all is written."""

    @property
    def frames(self) -> int:
        """Whose codes have all been written."""
        written = max(0, len(self._written) - max(self._delays))
        return written if self._end is None else min(written, self._end)

    def codes(self) -> torch.Tensor:
        """``(K, T)``"""
        table, frames = torch.stack(self._written), self.frames
        rows = [table[delay : delay + frames, k] for k, delay in enumerate(self._delays)]
        return torch.stack(rows)

    def finish(self, whole: torch.Tensor | None = None) -> None:
        """Say the rest. ``whole``: what all codes decode to, if that is known."""
        if whole is None:
            if not self.frames:
                return
            whole = self._codec.decode(self.codes())
        self._say(whole[self._sent :])

    def _pass_on(self, sound: torch.Tensor, frames: int) -> None:
        until = frames * self._codec.hop
        self._say(sound[self._sent : until])
        self._sent = until
