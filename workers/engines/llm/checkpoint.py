"""Opens a checkpoint directory: configuration, weights, tokenizer; refuses what is not proven.

A family is proven by a test that compares it with ``generate()`` token for token. Nothing is
downloaded, no code of a checkpoint is run, and weights are safetensors only. Whatever stands in the
way is a ``ValueError`` with a sentence for the operator.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as library_logging

from workers.contract.models import ModelSpec
from workers.engines.llm import varlen
from workers.engines.llm.cache import CacheShape, attention_modules
from workers.engines.llm.options import Options, read_context
from workers.engines.llm.vocabulary import Vocabulary, read_vocabulary
from workers.engines.precision import quantize

log = logging.getLogger(__name__)

FAMILIES: Final = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Gemma3ForCausalLM",
)
BLOCK_TOKENS: Final = 64
"""Of the cache that gathers; a prompt is read in pieces as long."""
_WAY_OUT: Final = "serve it with vLLM or llama-server and point an `upstream` entry at it"


class Weights:
    """A loaded model, its context in tokens, and the cache that it needs."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        self.path = directory(spec)
        self.context, self.shape = read_shape(spec, options)
        self.device = options.torch_device
        self.model: Any = read_model(self.path, options)


class Checkpoint(Weights):
    """A model that holds conversations, with its vocabulary."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.vocabulary: Vocabulary = read_vocabulary(self.path, self.model)


def directory(spec: ModelSpec) -> Path:
    if spec.checkpoint is None:
        raise ValueError("the entry names no checkpoint; it is the directory of the weights")
    path = Path(spec.checkpoint)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"{path} is no checkpoint that can be served: it has no {name}")
    if not weight_files(path):
        raise ValueError(f"{path} has no *.safetensors; weights of another kind are not read")
    return path


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_shape(spec: ModelSpec, options: Options) -> tuple[int, CacheShape]:
    """The context of an entry, bounded by what is computed rightly, and the cache of an entry."""
    config = _read_config(directory(spec))
    context = _bound_context(spec, config)
    device, dtype = options.torch_device, options.torch_dtype
    paged = varlen.find_attention(device, dtype) is not None
    block_tokens = varlen.BLOCK_TOKENS if paged else BLOCK_TOKENS
    # Every sequence needs a block more than its tokens fill, at most.
    tokens = options.cache_tokens or options.slots * (context + block_tokens)
    head_dim = getattr(config, "head_dim", None)
    return context, CacheShape(
        layers=config.num_hidden_layers,
        blocks=-(-tokens // block_tokens),
        block_tokens=block_tokens,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        dtype=dtype,
    )


def _read_config(path: Path) -> Any:
    """Read the configuration of a proven family."""
    try:
        document = json.loads((path / "config.json").read_text())
        family = (document.get("architectures") or ["unknown"])[0]
    except (ValueError, AttributeError, LookupError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read: {error}") from error
    if family not in FAMILIES:
        proven = ", ".join(FAMILIES)
        raise ValueError(f"{family} is not among the proven families ({proven}); {_WAY_OUT}")
    if quantization := document.get("quantization_config"):
        method = quantization.get("quant_method", "an unknown method")
        raise ValueError(f"the weights are quantised ({method}), which is not read; {_WAY_OUT}")
    if document.get("use_bidirectional_attention"):
        raise ValueError(f"the model attends in both directions, and cannot write; {_WAY_OUT}")
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _bound_context(spec: ModelSpec, config: Any) -> int:
    """Take the context that the operator asked for, or the most that is computed rightly."""
    asked = read_context(spec)
    positions, window = int(config.max_position_embeddings), _sliding_window(config)
    bounds = [(positions, f"the model was made for {positions} positions")]
    if window is not None:
        bounds.append((window, f"its sliding window is {window}, beyond which it cannot be served"))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this the library turns all positions of a batch by other frequencies, those of the
        # sequences that are shorter and of what is in the cache already included.
        switch = int(rope["original_max_position_embeddings"])
        bounds.append((switch, f"its long rotary factors, from {switch} on, are not supported"))
    bound, reason = min(bounds)
    if asked is None:
        if bound < positions:
            log.warning("context is limited", extra={"context_tokens": bound, "because": reason})
        return bound
    if asked > bound:
        raise ValueError(f"limits.context_tokens is {asked}, but {reason}")
    return asked


def _sliding_window(config: Any) -> int | None:
    """The window of the layers that have one; a context as long as it is attended to in full."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if window is None or (layers is not None and "sliding_attention" not in layers):
        return None
    return int(window)


def read_model(path: Path, options: Options) -> Any:
    # The log is one JSON object a line, so the library's bars and its own handler are in the way.
    noise: Any = library_logging
    noise.disable_progress_bar()
    noise.disable_default_handler()
    noise.enable_propagation()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=options.torch_dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {error}") from error
    model, report = loaded
    # The library would go on with random numbers in place of what is missing or does not fit.
    for problem in ("missing", "mismatched"):
        if keys := report[f"{problem}_keys"]:
            first = min(str(key if isinstance(key, str) else key[0]) for key in keys)
            raise ValueError(
                f"the weights in {path} do not fit config.json: {len(keys)} {problem}, "
                f"{first} among them"
            )
    if len(attention_modules(model)) != model.config.num_hidden_layers:
        raise ValueError(f"the attention layers of {path} were not found; {_WAY_OUT}")
    model = model.to(options.torch_device).requires_grad_(False).eval()
    quantize(model, options.dtype)
    return model
