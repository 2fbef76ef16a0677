"""Loads an embedding checkpoint and computes vectors of texts.

Every problem of a checkpoint is a ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel

from workers.contract.jobs import Prompt
from workers.contract.models import ModelSpec
from workers.engines.checkpoints import (
    check_family,
    checkpoint_path,
    read_architecture,
    read_model,
    read_tokenizer,
)
from workers.engines.embedding.options import Options, normalizes, pooling_of

ENCODERS: Final = ("BertModel", "RobertaModel", "XLMRobertaModel", "MPNetModel", "ModernBertModel")
DECODERS: Final = ("Qwen2Model", "Qwen3Model", "LlamaModel", "MistralModel")
_HEADS: Final = ("ForCausalLM", "ForMaskedLM")
_ALTERNATIVE: Final = "serve it elsewhere and point an `upstream` entry at it"


class EncoderLayout:
    """What a checkpoint says of its model beside the weights. ``context`` is the maximum number of
    tokens of one text."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        self.path = checkpoint_path(spec)
        family = _read_family(self.path)
        self.tokenizer: Any = read_tokenizer(self.path)
        self.pooling = pooling_of(self.path, options, is_decoder=family in DECODERS)
        self.normalizes = normalizes(self.path, options)
        config = AutoConfig.from_pretrained(
            self.path, local_files_only=True, trust_remote_code=False
        )
        self.dimensions = int(config.hidden_size)
        dimensions = spec.limits.get("dimensions")
        if dimensions is not None and dimensions != self.dimensions:
            raise ValueError(
                f"limits.dimensions is {dimensions}, but the model's vectors have {self.dimensions}"
            )
        positions = int(config.max_position_embeddings)
        if family in ("RobertaModel", "XLMRobertaModel", "MPNetModel"):
            # The positions of these families start after that of the padding.
            positions -= int(config.pad_token_id) + 1
        context = spec.limits.get("context_tokens") or positions
        if context > positions:
            raise ValueError(
                f"limits.context_tokens is {context}, but the model supports {positions} positions"
            )
        self.context = int(context)


class Encoder:
    """A loaded embedding model. ``context`` is the maximum number of tokens of one text."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        layout = EncoderLayout(spec, options)
        self._device = options.torch_device
        # The pooler of a checkpoint is never used, so it can be missing.
        self.model: Any = read_model(AutoModel, layout.path, options, unused="pooler")
        self._size = int(self.model.get_input_embeddings().num_embeddings)
        self._tokenizer = layout.tokenizer
        self._prefix = options.prefix
        self._pooling = layout.pooling
        self._normalizes = layout.normalizes
        self.dimensions = layout.dimensions
        self.context = layout.context

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokenize a text, with the tokens that mark its beginning and end; pass token ids through.

        Raise ``ValueError`` if there are no tokens, or one that the model does not have.
        """
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer.encode(self._prefix + prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("it has no tokens")
        if min(ids) < 0 or max(ids) >= self._size:
            unknown = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"it contains token {unknown}; tokens are 0 to {self._size - 1}")
        return ids

    def embed(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the vectors of texts ``(texts, dimensions)``, float32, cpu.

        Texts are padded on the right, where masks and causal attention hide the padding.
        """
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        pad = getattr(self.model.config, "pad_token_id", None)
        if pad is not None:
            ids[mask == 0] = pad
        ids, mask = ids.to(self._device), mask.to(self._device)
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        vectors = self._pool(hidden, mask).cpu()
        return F.normalize(vectors, dim=-1) if self._normalizes else vectors

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling == "cls":
            return hidden[:, 0]
        lengths = mask.sum(1)
        if self._pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        return (hidden * mask[:, :, None]).sum(1) / lengths[:, None]

    def shorten(self, vector: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        """Truncate a vector, and normalise the result if vectors of this model are normalised."""
        if dimensions is None or dimensions == self.dimensions:
            return vector
        short = vector[:dimensions]
        return F.normalize(short, dim=-1) if self._normalizes else short


def _read_family(path: Path) -> str:
    """Return the checkpoint's model family, without its head. Raise if it is not supported."""
    _, family = read_architecture(path)
    for head in _HEADS:
        if family.endswith(head):
            family = f"{family.removesuffix(head)}Model"
    check_family(family, (*ENCODERS, *DECODERS), _ALTERNATIVE)
    return family
