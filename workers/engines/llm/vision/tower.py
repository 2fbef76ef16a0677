"""The vision tower: makes of a picture's patches what the language model reads in place of tokens.

The library's own modules. Each picture is a separate forward, so what it gives does not depend on
other pictures. It is one step, however large: ``limits.source_tokens`` bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import torch

from workers.engines.llm.vision.pictures import Picture

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

    def encode_missing(self, pictures: Iterable[Picture]) -> float:
        """Encode pictures that have no features. Return what that costs, in tokens of the language
        model without a context."""
        missing = [picture for picture in pictures if picture.features is None]
        for picture in missing:
            self.encode(picture)
        return sum(len(picture.patches) for picture in missing) * self._patch_cost

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
