"""Experts of a mixture-of-experts layer, with the same bits for a token whatever else is in a step.

The library runs each expert on the tokens that were routed to it, however few. The kernel of a
product depends on the number of its rows, so a token's result would depend on where the others were
routed. Here the rows of each product are padded as those of all other products are, and the results
of a token are added in the order of its own routing.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION: Final = "tollgate_experts"
_MULTIPLE: Final = "tollgate_rows_multiple"
"""Attribute of an experts' module: the multiple to which the rows of a product are padded."""
_DEFAULT_MULTIPLE: Final = 4


def has_experts(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "num_experts_per_tok", None))


def active_share(model: Any) -> float:
    """Return the share of the experts that a token is routed to; 1 without experts."""
    if not has_experts(model):
        return 1.0
    config = model.config
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return float(config.num_experts_per_tok / count)


def attach_experts(model: Any) -> None:
    """Make the experts of a model on a CPU independent of each other's rows."""
    if has_experts(model) and model.device.type == "cpu":
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run)
        model.set_experts_implementation(IMPLEMENTATION)


def pad_experts(model: Any, multiple: int) -> None:
    """Pad the rows of each expert to a multiple, as those of the other products are."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            setattr(module, _MULTIPLE, multiple)


def _run(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the experts of each token, ``hidden`` ``(tokens, size)``; index and weights
    are ``(tokens, top_k)``."""
    tokens, top_k = top_k_index.shape
    routed = top_k_index.flatten()
    order = routed.argsort(stable=True)
    counts = torch.bincount(routed, minlength=module.num_experts).tolist()
    parts = hidden.new_empty(tokens * top_k, hidden.shape[1])
    multiple = getattr(module, _MULTIPLE, _DEFAULT_MULTIPLE)
    for expert, places in enumerate(torch.split(order, counts)):
        if not len(places):
            continue
        rows = F.pad(hidden[places // top_k], (0, 0, 0, -len(places) % multiple))
        gate, up = F.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
        made = F.linear(module.act_fn(gate) * up, module.down_proj[expert])
        parts[places] = made[: len(places)]
    weighted = parts.view(tokens, top_k, -1) * top_k_weights[..., None].to(parts.dtype)
    summed = weighted[:, 0]
    for rank in range(1, top_k):
        summed = summed + weighted[:, rank]
    return summed
