"""Lets calls of a denoiser share a batch although their texts have different lengths.

Some pipelines pass texts without padding. Their calls are padded to a common shape before the batch
point and trimmed to the longest text of the batch behind it, so that a call alone computes exactly
what the stock pipeline does and one in a batch attends to nothing but its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput

Function: TypeAlias = Callable[..., Any]
MakePoint: TypeAlias = Callable[[Function], Function]

_MULTIPLE: Final = 512
"""Padded lengths are multiples of this; the pipelines cut texts at 512 tokens by default."""


def join(denoiser: Any, forward: Function, make_point: MakePoint) -> Function:
    """Return ``forward`` as a batch point, for texts of different lengths where that is needed."""
    adapter = _ADAPTERS.get(type(denoiser).__name__)
    return make_point(forward) if adapter is None else adapter(forward, make_point)


def _pad(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    length = tensor.shape[dim]
    missing = -length % _MULTIPLE
    return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1 - dim), 0, missing))


def _masked(forward: Function, make_point: MakePoint) -> Function:
    """For ``encoder_hidden_states`` ``(B, L, D)`` with a mask that is None if all are valid."""

    def compute(
        *,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        **rest: Any,
    ) -> Any:
        valid = encoder_hidden_states_mask
        length = int(valid.any(dim=0).nonzero().max()) + 1
        valid = valid[:, :length]
        return forward(
            encoder_hidden_states=encoder_hidden_states[:, :length],
            encoder_hidden_states_mask=None if bool(valid.all()) else valid,
            **rest,
        )

    point = make_point(compute)

    def call(
        *,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        **rest: Any,
    ) -> Any:
        valid = encoder_hidden_states_mask
        if valid is None:
            valid = encoder_hidden_states.new_ones(encoder_hidden_states.shape[:2])
        return point(
            encoder_hidden_states=_pad(encoder_hidden_states, 1),
            encoder_hidden_states_mask=_pad(valid.bool(), 1),
            **rest,
        )

    return call


def _listed(forward: Function, make_point: MakePoint) -> Function:
    """For lists of latents ``(C, F, H, W)`` and of texts ``(L, D)``, one of each per row."""

    def compute(
        x: torch.Tensor, t: torch.Tensor, texts: torch.Tensor, lengths: torch.Tensor, **rest: Any
    ) -> torch.Tensor:
        rows = zip(texts, lengths.tolist(), strict=True)
        features = [text[:length] for text, length in rows]
        return torch.stack(forward(list(x), t, features, return_dict=False, **rest)[0])

    point = make_point(compute)

    def call(
        x: list[torch.Tensor],
        t: torch.Tensor,
        cap_feats: list[torch.Tensor],
        return_dict: bool = True,
        **rest: Any,
    ) -> Any:
        longest = max(len(text) for text in cap_feats)
        texts = torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in cap_feats])
        lengths = torch.tensor([len(text) for text in cap_feats])
        latents = list(point(torch.stack(x), t, _pad(texts, 1), lengths, **rest))
        return Transformer2DModelOutput(sample=latents) if return_dict else (latents,)

    return call


_ADAPTERS: Final[Mapping[str, Callable[[Function, MakePoint], Function]]] = {
    "QwenImageTransformer2DModel": _masked,
    "ZImageTransformer2DModel": _listed,
}
"""By the denoiser's class."""
