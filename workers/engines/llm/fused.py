"""The forward of a model over its paged cache: our own for models of Llama's shape, otherwise the
library's.

The library's modules launch some forty operations per layer, and a CPU's matrix product reorders
the weights at every call. Here query, key and value are one product, and so are gate and up. On a
CPU, the weights of small products are kept column by column, and those of large ones in the order
in which oneDNN multiplies, so four rows cost little more than one. The weights are taken out of the
library's modules, which cannot be called afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.llm.cache import PagedCache, attach
from workers.engines.llm.families.latent import attach_latents
from workers.engines.llm.vision.tower import VISION_FAMILIES, has_vision

FUSED_FAMILIES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    *VISION_FAMILIES,
)
_COLUMNS_MAX: Final = 1 << 18
"""Maximum weights of a product to keep column by column; for larger ones packing saves more than
its call costs."""
_PACKED_FROM: Final = 1 << 15
"""Minimum weights of a product to pack, if they are not kept column by column."""
_ROWS_COMPARED: Final = (2048, 520, 200, 128, 64, 12, 4, 2)
"""Numbers of rows beside which a row must have the same bits: up to the tokens of a step."""
_COPIED_MAX: Final = 1 << 24
"""Maximum weights of a head that are kept twice, because the embedding is the same matrix."""
_PACKING_ROWS: Final = 4
"""Rows for which oneDNN chooses the order of packed weights."""

Features: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Indices of tokens in a forward, and embeddings ``(tokens, size)`` in place of theirs."""


class PagedModel(Protocol):
    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits_at: torch.Tensor | None,
        features: Features | None = None,
    ) -> torch.Tensor:
        """Return the logits ``(tokens, vocabulary)`` at the indices ``logits_at``, or at all.

        ``ids`` and ``positions`` are ``(1, tokens)``. Only models that read pictures are given
        ``features``, and positions ``(3, tokens)``: of time, height and width.
        """
        ...


def make_model(model: Any, cache: PagedCache[Any], positions: int) -> PagedModel:
    """Connect a model with its cache. ``positions``: the first that no sequence reaches."""
    if _is_llama_shaped(model):
        with torch.inference_mode(False), torch.no_grad():
            return FusedModel(model, cache, positions)
    family = type(model).__name__
    if has_vision(family):
        raise ValueError(f"a {family} is supported with the activation silu and without windows")
    attach(model, cache)
    attach_latents(model)
    return functools.partial(_run_library, model)


def _run_library(
    model: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits_at: torch.Tensor | None,
    features: Features | None = None,
) -> torch.Tensor:
    assert features is None
    kept = 0 if logits_at is None else logits_at
    out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept)
    logits: torch.Tensor = out.logits[0]
    return logits


def _is_llama_shaped(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        type(model).__name__ in FUSED_FAMILIES
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    after: _Norm
    qkv: _Product
    out: _Product
    gate_up: _Product
    down: _Product
    qk_norm: _Norm | None
    scaling: float


class FusedModel:
    """A model of Llama's shape. It has the weights, and each only once."""

    def __init__(self, model: Any, cache: PagedCache[Any], positions: int) -> None:
        config = model.config.get_text_config()
        body = getattr(model.model, "language_model", model.model)
        self._cache = cache
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = cache.shape.head_dim
        eps = float(config.rms_norm_eps)
        self._embedding = body.embed_tokens.weight
        self._norm = _Norm(body.norm.weight, eps)
        # The decoder's probe fills a whole block.
        self._cos, self._sin = _rotations(body, max(positions, cache.shape.block_tokens))
        self._axes = _axes(config, self._cos)
        self._layers = [self._take(layer, eps) for layer in body.layers]
        head = model.lm_head
        tied = head.weight is self._embedding
        packs = not tied or head.weight.numel() <= _COPIED_MAX
        self._head = _Product([head], packs=packs, keeps=tied)

    def _take(self, layer: Any, eps: float) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            qkv, gate_up = [attention.qkv_proj], [mlp.gate_up_proj]
        else:
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            gate_up = [mlp.gate_proj, mlp.up_proj]
        norm = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm.weight, attention.k_norm.weight
            scales = torch.stack([query] * self._heads + [key] * self._kv_heads)
            norm = _Norm(scales[None], eps)
        return _Layer(
            before=_Norm(layer.input_layernorm.weight, eps),
            after=_Norm(layer.post_attention_layernorm.weight, eps),
            qkv=_Product(qkv),
            out=_Product([attention.o_proj]),
            gate_up=_Product(gate_up),
            down=_Product([mlp.down_proj]),
            qk_norm=norm,
            scaling=attention.scaling,
        )

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits_at: torch.Tensor | None,
        features: Features | None = None,
    ) -> torch.Tensor:
        attend = self._cache.attend
        x = self._embedding.index_select(0, ids[0])
        if features is not None:
            x = x.index_copy(0, *features)
        cos, sin = self._turns(self._cos, positions), self._turns(self._sin, positions)
        tokens = len(x)
        heads, turned = self._heads, self._heads + self._kv_heads
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.before(x))
            qkv = qkv.view(tokens, -1, self._head_dim)
            qk, value = qkv[:, :turned], qkv[:, turned:]
            if layer.qk_norm is not None:
                qk = layer.qk_norm(qk)
            qk = _rotate(qk, cos, sin)
            qk = qk.transpose(0, 1)[None]
            query, key = qk[:, :heads], qk[:, heads:]
            attended = attend(number, query, key, value.transpose(0, 1)[None], layer.scaling)
            x = x + layer.out(attended.reshape(tokens, -1))
            gate, up = layer.gate_up(layer.after(x)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        if logits_at is not None:
            x = x.index_select(0, logits_at)
        return self._head(self._norm(x))

    def _turns(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table of rotations, each dimension by the position on its axis."""
        if len(positions) == 1:
            return table.index_select(0, positions[0])
        rows = table[positions]
        return rows.gather(0, self._axes.expand(1, *rows.shape[1:]))[0]


def _rotations(body: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``(positions, 1, dimensions)``, made by the library's own module, so
    that scaled frequencies are right.

    Draft tokens can stand behind the last position, where nothing is kept.
    """
    config = body.config
    last = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # The frequencies of all positions change behind this one.
        last = min(last, int(rope["original_max_position_embeddings"]))
    device = body.embed_tokens.weight.device
    places = torch.arange(positions, device=device).clamp_(max=last - 1)
    cos, sin = (part[0] for part in body.rotary_emb(body.embed_tokens.weight[:1], places[None]))
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    return cos[:, None].contiguous(), signed[:, None].contiguous()


def _axes(config: Any, cos: torch.Tensor) -> torch.Tensor:
    """Return by which axis of a position each dimension is rotated, as the library does."""
    rope = getattr(config, "rope_parameters", None) or {}
    sections = rope.get("mrope_section") or [cos.shape[-1] // 2]
    axes = [index % 3 for index, size in enumerate(sections) for _ in range(size)]
    return torch.tensor(axes * 2, device=cos.device)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys ``(tokens, heads, head_dim)``; only the first dimensions if there are
    fewer cosines. ``sin`` is negative in its first half."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((_rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)


class _Norm:
    """Divides vectors by the root of their mean square, then scales them."""

    def __init__(self, scales: torch.Tensor, eps: float) -> None:
        """``scales``: ``(size,)``, or those of several vectors ``(1, vectors, size)``."""
        self._size = scales.shape[-1]
        self._eps = eps
        self._scales = scales
        self._floor: torch.Tensor | None = None
        if scales.device.type == "cpu" and scales.dtype == torch.float32:
            # The same in three operations, where torch's own function takes seven.
            self._floor = torch.tensor([(eps * self._size) ** 0.5])
            self._scales = scales * self._size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._floor is not None:
            length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
            return x / length * self._scales
        if self._scales.ndim == 1:
            return F.rms_norm(x, (self._size,), self._scales, self._eps)
        return F.rms_norm(x, (self._size,), None, self._eps) * self._scales


class _Product:
    """Linear layers with the same input, as one product; quantised ones are called as they are."""

    def __init__(self, layers: Sequence[Any], *, packs: bool = True, keeps: bool = False) -> None:
        """``packs``: whether weights can be packed. ``keeps``: whether the layers stay usable."""
        self._layers = [layer for layer in layers if not isinstance(layer, nn.Linear)]
        self._weight = self._packed = self._bias = None
        if self._layers:
            self._layers = list(layers)
            return
        weights = [layer.weight for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if layers[0].bias is not None:
            self._bias = torch.cat([layer.bias for layer in layers])
        if not keeps:
            for layer in layers:
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        if packs and weight.numel() <= _COLUMNS_MAX and _is_steady(weight, self._bias):
            self._weight = weight.detach().t().contiguous().t()
        elif packs and weight.numel() >= _PACKED_FROM and _packs(weight.device, weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKING_ROWS)
        else:
            self._weight = weight.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self._bias, "none", [], ""
            )
            return out
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        parts = [layer(x) for layer in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _is_steady(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product by columns gives a row the same bits beside any number of others."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return _is_shape_steady(*weight.shape, bias is not None, torch.get_num_threads())


@functools.cache
def _is_shape_steady(outputs: int, inputs: int, has_bias: bool, _threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    most, *fewer = _ROWS_COMPARED
    x = torch.randn(most, inputs, generator=generator)
    weight = torch.randn(inputs, outputs, generator=generator).t()
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    whole = F.linear(x, weight, bias)
    return all(torch.equal(F.linear(x[:rows], weight, bias), whole[:rows]) for rows in fewer)


@functools.cache
def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this type here, and correctly."""
    if device.type != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 256, generator=generator).to(dtype) for rows in (256, 8))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(product, F.linear(x, weight), rtol=2e-2, atol=2e-1)
