"""Multi-head latent attention, of DeepSeek: the cache has one latent for each token.

The library makes keys and values of all heads from the latents of the whole past, in every step.
Both are linear in the latent, so the same numbers come from projecting the query instead, attending
to the latents as if they were the keys and values of one head, and projecting the result. Keys and
values of a past token are never made; its cache is a latent and a rotary key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.engines.llm.cache import attention_modules


def latent_size(config: Any) -> int | None:
    """Return the size of a token's latent; None for other attentions."""
    return getattr(config, "kv_lora_rank", None)


def check_routing(config: Any) -> None:
    """Raise ``ValueError`` if experts are chosen in a way that the library does not compute."""
    if config.model_type != "deepseek_v2":
        return
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {config.topk_method} is not supported")
    if config.norm_topk_prob:
        raise ValueError("norm_topk_prob is not supported for DeepSeek-V2")


def attach_latents(model: Any) -> None:
    """Make attention layers give their cache latents. Their projections are taken from the modules,
    which cannot be called without a cache afterwards."""
    if latent_size(model.config) is None:
        return
    for module in attention_modules(model):
        module.tollgate_latents = LatentProjections(module)
        module.expand_kv = _keep_latent
        module.kv_b_proj = None


def _keep_latent(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((latent, rotary), dim=-1), latent


class LatentProjections:
    """``_key`` ``(heads, size, latent)`` projects queries, ``_value`` ``(heads, latent, size)``
    results."""

    def __init__(self, module: Any) -> None:
        made = module.kv_b_proj
        if isinstance(made, nn.Linear):
            weight = made.weight
        else:  # quantised
            like = module.kv_a_layernorm.weight
            weight = made(torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)).t()
        sizes = [module.qk_nope_head_dim, module.v_head_dim]
        heads = weight.detach().view(module.num_heads, sum(sizes), -1)
        key, value = torch.split(heads, sizes, dim=1)
        self._key = key.contiguous()
        self._value = value.transpose(1, 2).contiguous()

    def project_query(self, query: torch.Tensor) -> torch.Tensor:
        """Return ``(1, heads, tokens, latent + rotary)`` of ``(1, heads, tokens, size)``."""
        size = self._key.shape[1]
        plain, rotary = query[..., :size], query[..., size:]
        return torch.cat((plain @ self._key, rotary), dim=-1)

    def project_result(self, attended: torch.Tensor) -> torch.Tensor:
        """Return ``(1, tokens, heads, size)`` of ``(1, tokens, heads, latent)``."""
        made: torch.Tensor = (attended.transpose(1, 2) @ self._value).transpose(1, 2)
        return made
