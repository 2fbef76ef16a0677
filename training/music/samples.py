"""Samples of the pocket music model: a tune and the caption that describes it."""

from __future__ import annotations

import random
from typing import NamedTuple

from training.common.split import Content
from training.music.tunes import tune
from workers.engines.music.notes import Piece
from workers.engines.music.prompt import caption, parse_prompt


class Sample(NamedTuple):
    piece: Piece
    caption: str

    @property
    def content(self) -> Content:
        """The caption as the model reads it."""
        return ("caption", *parse_prompt(self.caption).words)


def describe(r: random.Random) -> Sample:
    piece = tune(r)
    return Sample(piece, caption(piece, r))
