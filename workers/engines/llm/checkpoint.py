"""Opens a checkpoint directory: configuration, tokenizer, weights; refuses what is not proven.

A family is proven by a test that compares it with ``generate()`` token for token. Nothing is
downloaded, no code of a checkpoint is run, and weights are safetensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from workers.contract.models import ModelSpec

FAMILIES: Final = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Gemma3ForCausalLM",
)
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHARED_OPTIONS: Final = frozenset({"concurrency", "weight", "step_limit_s", "load_limit_s"})


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``registry.Serving``."""

    dtype: str = "float32"
    device: str = "cpu"
    slots: int = 8
    """Sequences at a time; the cache is this many times the context."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    own = {name: value for name, value in spec.options.items() if name not in SHARED_OPTIONS}
    try:
        options = msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        accepted = ", ".join(Options.__struct_fields__)
        raise ValueError(f"{error}; options of the engine llm are {accepted}") from error
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype is {options.dtype!r}; one of {', '.join(DTYPES)} is accepted")
    if options.dtype == "float16" and options.device == "cpu":
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    if options.slots < 1:
        raise ValueError(f"slots is {options.slots}; at least 1 is needed")
    return options


class Checkpoint:
    """A loaded model and its tokenizer."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        path = Path(spec.checkpoint or "")
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no checkpoint: there is no config.json")
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        family = (config.architectures or ["unknown"])[0]
        if family not in FAMILIES:
            raise ValueError(
                f"{family} is not among the proven families ({', '.join(FAMILIES)}); serve it with "
                "vLLM or llama-server and point an `upstream` entry at it"
            )
        self.device = torch.device(options.device)
        self.dtype = DTYPES[options.dtype]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self.tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {path} has no chat template")
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, use_safetensors=True, dtype=self.dtype
        )
        self.model: Any = model.to(self.device).requires_grad_(False).train(False)
        self.config: Any = self.model.config.get_text_config()
        self.context = _context(self.config, spec.limits.get("context_tokens"))
        self.end_tokens = _end_tokens(self.model, self.tokenizer)


def _context(config: Any, asked: Any) -> int:
    """Bound the context by what the model was made for, its sliding window included."""
    bounds = [int(config.max_position_embeddings)]
    if asked is not None:
        bounds.append(int(asked))
    slides = getattr(config, "use_sliding_window", True)
    if slides and (window := getattr(config, "sliding_window", None)):
        bounds.append(int(window))
    return min(bounds)


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
