"""Prunes a trained UNet where most of its weights are: in its innermost blocks.

The pruned UNet keeps most of what was learned, and relearns the rest in a fraction of the time that
a new one takes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers import UNet2DConditionModel

_INNERMOST: Final = ("down_blocks.2.", "mid_block.", "up_blocks.0.")
_WRITERS: Final = ("conv2.weight", "conv_shortcut.weight", "to_out.0.weight")
"""Weights whose outputs are added to the channels that these blocks share."""


def prune(wide: Any, channels: int) -> Any:
    """Return the UNet with ``channels`` innermost channels, and proportionally smaller heads.

    In each group of a norm, and in each head, the channels with the largest weights are kept.
    ``channels`` is a multiple of the number of groups. For UNets of ``denoising.make_unet``.
    """
    *outer, before = wide.config.block_out_channels
    head = wide.config.attention_head_dim
    small = head * channels // before
    config = {key: value for key, value in wide.config.items() if not key.startswith("_")}
    config["block_out_channels"] = (*outer, channels)
    # For each block from the innermost outwards; the outermost blocks have no attention.
    config["attention_head_dim"] = (small, head, small)
    made: Any = UNet2DConditionModel(**config)

    old = {name: weights.detach() for name, weights in wide.named_parameters()}
    norms = torch.zeros(before)
    for name, weights in old.items():
        if name.startswith(_INNERMOST) and name.endswith(_WRITERS):
            norms += weights.flatten(1).norm(dim=1) / weights.norm()
    groups = wide.config.norm_num_groups
    shared = _largest(norms, groups, channels // groups)
    behind = {
        channels: shared,
        2 * channels: torch.cat([shared, before + shared]),
        outer[-1] + channels: torch.cat([shared, before + torch.arange(outer[-1])]),
    }
    loud = {
        name.removesuffix(".to_q.weight"): weights.norm(dim=1)
        * old[name.replace("to_q", "to_k")].norm(dim=1)
        for name, weights in old.items()
        if name.endswith(".to_q.weight")
    }
    for name, weights in made.named_parameters():
        block, _, layer = name.partition(".to_" if ".to_" in name else ".add_")
        part = old[name]
        for axis, (size, was) in enumerate(zip(weights.shape, part.shape, strict=True)):
            if size == was:
                continue
            if layer and (axis == 1) == layer.startswith("out"):
                kept = _largest(loud[block], before // head, small)
            else:
                kept = behind[size]
            part = part.index_select(axis, kept)
        if layer.startswith("q.") and part.shape != old[name].shape:
            part = part * (small / head) ** 0.5
        with torch.no_grad():
            weights.copy_(part)
    return made


def _largest(norms: torch.Tensor, groups: int, each: int) -> torch.Tensor:
    """Return the indices of the ``each`` largest of every group, sorted."""
    best = norms.view(groups, -1).topk(each, dim=1).indices.sort(dim=1).values
    return (best + len(norms) // groups * torch.arange(groups)[:, None]).flatten()
