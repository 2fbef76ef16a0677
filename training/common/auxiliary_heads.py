"""Auxiliary classification heads on the UNet of ``pocket-image`` or ``pocket-video``.

For training only. From its innermost features the UNet must predict the content of the target, and
from the next ones where an instruction changes something. So it learns within thousands of samples
which of two things is meant, and to move a thing from one place to another; from images alone it
had learned neither after a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from training.common.scenes import BACKGROUNDS, LIGHTS, SHIPPED, SIZES, STYLES, Scene, World


def classes_of(world: World) -> dict[str, tuple[str, ...]]:
    """Return the classes of each head for scenes of a world."""
    things = (("shape", world.shapes), ("colour", world.colours), ("size", tuple(SIZES)))
    return {"background": tuple(BACKGROUNDS), "light": LIGHTS, "style": STYLES} | {
        f"{name}{number}": (*values, "none") for number in (1, 2) for name, values in things
    }


CLASSES: Final = classes_of(SHIPPED)


def scene_classes(s: Scene) -> dict[str, str]:
    """Return the content of a scene as classes, its upper left thing first."""
    found = {"background": s.background, "light": s.light, "style": s.style}
    things = sorted(s.things, key=lambda one: one.x + 0.7 * one.y)
    for number in (1, 2):
        one = things[number - 1] if number <= len(things) else None
        for name in ("shape", "colour", "size"):
            found[f"{name}{number}"] = getattr(one, name) if one else "none"
    return found


class AuxiliaryHeads(nn.Module):
    """Heads on a UNet's features; ``loss`` refers to its last forward pass."""

    def __init__(self, unet: Any, classes: Mapping[str, Sequence[str]] = CLASSES) -> None:
        super().__init__()
        self._classes = classes
        inner = unet.config.block_out_channels[-1]
        self.what = nn.ModuleDict(
            {name: nn.Linear(2 * inner, len(values)) for name, values in classes.items()}
        )
        self.where = nn.Conv2d(inner, 1, 1)
        self._seen: dict[str, torch.Tensor] = {}
        unet.mid_block.register_forward_hook(self._keep("inner"))
        unet.up_blocks[0].register_forward_hook(self._keep("outer"))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            self._seen[name] = output

        return hook

    def loss(
        self, targets: Sequence[Mapping[str, str]], changed: torch.Tensor, instructed: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss. ``targets`` has a class for each head. ``changed`` ``(B, 1, H, W)`` is 0
        or 1; it counts only in the rows that are ``instructed`` ``(B,)``."""
        inner, outer = self._seen["inner"].float(), self._seen["outer"].float()
        pooled = torch.cat([inner.mean((2, 3)), inner.amax((2, 3))], 1)
        what = [
            F.cross_entropy(
                head(pooled),
                torch.tensor([self._classes[name].index(one[name]) for one in targets]),
            )
            for name, head in self.what.items()
        ]
        where = self.where(outer)
        small = F.adaptive_max_pool2d(changed, where.shape[2:])
        missed = F.binary_cross_entropy_with_logits(where, small, reduction="none")
        rows = instructed.float()[:, None, None, None]
        parts = [
            (missed * part * rows).sum() / (part * rows).sum().clamp(min=1)
            for part in (small, 1 - small)
        ]
        return (torch.stack(what).mean() + torch.stack(parts).sum()) / 2
