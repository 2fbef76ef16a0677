"""The vision tower: makes of a picture's patches what the language model reads in place of tokens.

The library's own modules. Each picture is a separate forward, so what it gives does not depend on
other pictures. It is interrupted between layers, so that answers are decoded in between: see
``interrupting``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import torch

from workers.engines.interrupting import SLICE_S, Interruptible, add_hooks
from workers.engines.llm.vision.pictures import Encoding, Picture

VISION_FAMILIES: Final = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
TOWER: Final = "model.visual."
"""Beginning of the names of the tower's weights."""


class Tower:
    """``model``: one of ``VISION_FAMILIES``."""

    def __init__(self, model: Any) -> None:
        self._tower = model.model.visual
        self._device: torch.device = model.device
        self._merge = int(model.config.vision_config.spatial_merge_size)
        # Each weight of the tower is multiplied once per patch; those of the model once per token.
        self._patch_cost = _count(self._tower) / max(_count(model) - _count(self._tower), 1)
        self._encoding: Encoding | None = None
        """What is being encoded now."""
        for block in self._tower.blocks:
            block.register_forward_pre_hook(self._count_part)
        self._parts = len(self._tower.blocks) + 1
        """What is before the first layer, and each layer with what follows."""
        add_hooks(self._tower)

    def encode_slice(self, pictures: Iterable[Picture], ends_s: float) -> float:
        """Encode pictures that have no features, until ``ends_s`` of the monotonic clock, and at
        least a part of one.

        Return what that has cost, in tokens of the language model without a context.
        """
        cost = 0.0
        for picture in (each for each in pictures if each.features is None):
            encoding, picture.encoding = picture.encoding or self._begin(picture), None
            done, self._encoding = encoding.parts, encoding
            # What is computed must not be bound to the mode of the step in which it began.
            with torch.inference_mode(False):
                ended = encoding.computation.run_slice(ends_s - time.monotonic())
            if ended:
                encoding.parts = self._parts
            else:
                picture.encoding = encoding
            share = (encoding.parts - done) / self._parts
            cost += share * len(picture.patches) * self._patch_cost
            if not ended or time.monotonic() >= ends_s:
                break
        self._encoding = None
        return cost

    def _begin(self, picture: Picture) -> Encoding:
        return Encoding(
            Interruptible(lambda: self.encode(picture), slice_s=SLICE_S, now_s=time.monotonic)
        )

    def _count_part(self, *_: Any) -> None:
        if self._encoding is not None:
            self._encoding.parts += 1

    def encode(self, picture: Picture) -> None:
        """Set a picture's features."""
        grid = [[1, picture.rows * self._merge, picture.columns * self._merge]]
        made = self._tower(
            picture.patches.to(self._device),
            grid_thw=torch.tensor(grid, device=self._device),
            return_dict=True,
        )
        picture.features = made.pooler_output

    def warm_up(self, tokens: int) -> None:
        """Encode an empty picture of at most ``tokens``, almost square."""
        rows = max(int(tokens**0.5), 1)
        vision = self._tower.config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        columns = max(tokens // rows, 1)
        patches = torch.zeros(rows * columns * self._merge**2, values)
        self.encode(Picture(patches, rows, columns, b""))


def has_vision(family: str) -> bool:
    return family in VISION_FAMILIES


def drop_tower(model: Any) -> None:
    """Free the memory of a tower that is not used."""
    model.model.visual = None


def _count(module: Any) -> int:
    return sum(tensor.numel() for tensor in chain(module.parameters(), module.buffers()))
