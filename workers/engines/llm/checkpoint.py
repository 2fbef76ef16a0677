"""Opens a checkpoint directory of a language model: configuration, weights and vocabulary.

Refuses everything that is not supported. A family is supported if a test compares it with
``generate()`` token by token. Every problem is a ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from workers.contract.models import ModelSpec
from workers.engines.checkpoints import (
    check_family,
    checkpoint_path,
    read_architecture,
    read_model,
)
from workers.engines.llm import varlen
from workers.engines.llm.cache import CacheShape, attention_modules
from workers.engines.llm.experts import active_share, attach_experts, has_experts
from workers.engines.llm.families.latent import check_routing, latent_size
from workers.engines.llm.options import Options, read_context, reads_pictures
from workers.engines.llm.vision.reader import PictureReader, make_reader
from workers.engines.llm.vision.tower import TOWER, VISION_FAMILIES, Tower, drop_tower, has_vision
from workers.engines.llm.vocabulary import Vocabulary, read_vocabulary
from workers.engines.memory import weights_bytes
from workers.engines.precision import QUANTIZED
from workers.engines.quantized.formats import read_format

log = logging.getLogger(__name__)

FAMILIES: Final = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    *VISION_FAMILIES,
)
BLOCK_TOKENS: Final = 64
"""Tokens of a block of ``GatherCache``, and of a prefill chunk."""
_ALTERNATIVE: Final = "serve it with vLLM or llama-server and point an `upstream` entry at it"


class Weights:
    """A loaded model, its context in tokens, and the shape of its cache."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        self.path = directory(spec)
        self.context, self.shape = read_shape(spec, options)
        self.device = options.torch_device
        self.model: Any = _read_weights(self.path, options)
        self.tower: Tower | None = None
        if has_vision(type(self.model).__name__):
            if reads_pictures(spec):
                self.tower = Tower(self.model)
            else:
                drop_tower(self.model)
        self.weights_bytes = weights_bytes(self.model)
        self.heads = int(self.model.config.get_text_config().num_attention_heads)
        self.context_cost = relative_context_cost(self.model, self.shape, self.heads)


class Checkpoint(Weights):
    """A chat model: weights and vocabulary."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.vocabulary: Vocabulary = read_vocabulary(
            self.path,
            size=int(self.model.get_input_embeddings().num_embeddings),
            end_tokens=self.model.generation_config.eos_token_id,
        )
        self.pictures: PictureReader | None = make_reader(
            self.path, type(self.model).__name__, spec, options, self.model.config, self.vocabulary
        )


def inspect(spec: ModelSpec, options: Options) -> tuple[Vocabulary, int, CacheShape]:
    """Check a checkpoint without reading its weights: vocabulary, context, shape of the cache.

    Raise ``ValueError`` as ``Checkpoint``.
    """
    path = directory(spec)
    config, family = _read_config(path)
    context, shape = read_shape(spec, options)
    text = config.get_text_config()
    size, ends = int(text.vocab_size), getattr(text, "eos_token_id", None)
    vocabulary = read_vocabulary(path, size=size, end_tokens=ends)
    make_reader(path, family, spec, options, config, vocabulary)
    return vocabulary, context, shape


def directory(spec: ModelSpec) -> Path:
    path = checkpoint_path(spec)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"{path} is not a supported checkpoint: it has no {name}")
    if not weight_files(path):
        raise ValueError(f"{path} has no *.safetensors; other formats of weights are not supported")
    return path


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_shape(spec: ModelSpec, options: Options) -> tuple[int, CacheShape]:
    """Return the context of an entry, as far as it is computed correctly, and its cache shape."""
    config = _read_config(directory(spec))[0].get_text_config()
    context = _bound_context(spec, config)
    device, dtype = options.torch_device, options.torch_dtype
    latent = latent_size(config)
    paged = latent is None and varlen.find_attention(device, dtype) is not None
    block_tokens = varlen.BLOCK_TOKENS if paged else BLOCK_TOKENS
    # A sequence's last block is partly filled, so each needs up to one block more.
    tokens = options.cache_tokens or options.slots * (context + block_tokens)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if latent is not None:
        head_dim = latent + config.qk_rope_head_dim
    return context, CacheShape(
        layers=config.num_hidden_layers,
        blocks=-(-tokens // block_tokens),
        block_tokens=block_tokens,
        kv_heads=config.num_key_value_heads if latent is None else 1,
        head_dim=head_dim,
        dtype=dtype,
        windows=_windows(config, context),
        latent=latent,
    )


def _read_config(path: Path) -> tuple[Any, str]:
    """Return the configuration of a supported family, and the family."""
    document, family = read_architecture(path)
    check_family(family, FAMILIES, _ALTERNATIVE)
    if read_format(path) is not None and has_vision(family):
        raise ValueError(f"quantised weights of {family} are not supported; {_ALTERNATIVE}")
    if document.get("use_bidirectional_attention"):
        raise ValueError(f"models with bidirectional attention cannot generate; {_ALTERNATIVE}")
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    try:
        check_routing(config)
    except ValueError as error:
        raise ValueError(f"{error}; {_ALTERNATIVE}") from error
    return config, family


def _bound_context(spec: ModelSpec, config: Any) -> int:
    """Return the configured context or, by default, the longest that is computed correctly."""
    context = read_context(spec)
    positions = int(config.max_position_embeddings)
    bounds = [(positions, f"the model supports {positions} positions")]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this the library changes the rotary frequencies of all positions in a batch,
        # including those of shorter sequences and of tokens already in the cache.
        switch = int(rope["original_max_position_embeddings"])
        bounds.append((switch, f"its long rotary factors, from {switch} on, are not supported"))
    bound, reason = min(bounds)
    if context is None:
        if bound < positions:
            log.warning("context is limited", extra={"context_tokens": bound, "because": reason})
        return bound
    if context > bound:
        raise ValueError(f"limits.context_tokens is {context}, but {reason}")
    return context


def _windows(config: Any, context: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; nothing if no window is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context:
        return ()
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def relative_context_cost(model: Any, shape: CacheShape, heads: int) -> float:
    """Return the cost of attending to one more token, relative to the products of a token.

    Attention multiplies and adds twice per position and dimension, products once per weight. The
    weights of experts are three-dimensional, and a token is multiplied by those of a few.
    """
    share = active_share(model)
    weights: float = sum(
        tensor.numel() * (share if tensor.ndim == 3 else 1.0)
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if not name.startswith(TOWER)
    )
    return 2 * shape.layers * heads * shape.head_dim / weights


def _read_weights(path: Path, options: Options) -> Any:
    _, family = read_architecture(path)
    loader = AutoModelForImageTextToText if has_vision(family) else AutoModelForCausalLM
    stored = read_format(path)
    model = read_model(loader, path, options)
    keeps = stored is not None and stored.keeps == options.dtype
    if has_experts(model) and options.dtype in QUANTIZED and not keeps:
        raise ValueError(
            f"dtype is {options.dtype}, but experts cannot be quantised; use bfloat16, or "
            f"{_ALTERNATIVE}"
        )
    attach_experts(model)
    if len(attention_modules(model)) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(f"the attention layers of {path} were not found; {_ALTERNATIVE}")
    return model
