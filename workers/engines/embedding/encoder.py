"""A checkpoint that makes vectors of texts. Whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as library_logging

from workers.contract.jobs import Prompt
from workers.contract.models import ModelSpec
from workers.engines.embedding.options import Options, normalizes, pooling_of

ENCODERS: Final = ("BertModel", "RobertaModel", "XLMRobertaModel", "MPNetModel", "ModernBertModel")
DECODERS: Final = ("Qwen2Model", "Qwen3Model", "LlamaModel", "MistralModel")
_HEADS: Final = ("ForCausalLM", "ForMaskedLM")


class Encoder:
    """A loaded model: token ids to vectors. ``context`` is the most tokens of one text."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        if spec.checkpoint is None:
            raise ValueError("the entry names no checkpoint; it is the directory of the weights")
        path = Path(spec.checkpoint)
        self._device = options.torch_device
        family = _family(path)
        self.model: Any = _read_model(path, options)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        self._prefix = options.prefix
        self._pooling = pooling_of(path, options, is_decoder=family in DECODERS)
        self._normalizes = normalizes(path, options)
        config = self.model.config
        self.dimensions = int(config.hidden_size)
        said = spec.limits.get("dimensions")
        if said is not None and said != self.dimensions:
            raise ValueError(
                f"limits.dimensions is {said}, but the model's vectors have {self.dimensions}"
            )
        self._size = int(self.model.get_input_embeddings().num_embeddings)
        positions = int(config.max_position_embeddings)
        if family in ("RobertaModel", "XLMRobertaModel", "MPNetModel"):
            # Their positions begin after that of the padding.
            positions -= int(config.pad_token_id) + 1
        asked = spec.limits.get("context_tokens") or positions
        if asked > positions:
            raise ValueError(
                f"limits.context_tokens is {asked}, but the model was made for {positions} "
                "positions"
            )
        self.context = int(asked)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokenize a text, with what marks its beginning and end; token ids stay as they are.

        Raise ``ValueError`` if there is nothing in it, or what the model does not know.
        """
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer.encode(self._prefix + prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("it comes to no token at all")
        if min(ids) < 0 or max(ids) >= self._size:
            odd = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"it takes the token {odd}, and there are 0 to {self._size - 1}")
        return ids

    def embed(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a vector for each text ``(texts, dimensions)``, float32, cpu.

        Texts are padded on the right, where neither a mask nor a decoder sees it.
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

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling == "cls":
            return hidden[:, 0]
        lengths = mask.sum(1)
        if self._pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        return (hidden * mask[:, :, None]).sum(1) / lengths[:, None]

    def shorten(self, vector: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        """The first numbers of a vector, of length one again if the whole was."""
        if dimensions is None or dimensions == self.dimensions:
            return vector
        short = vector[:dimensions]
        return F.normalize(short, dim=-1) if self._normalizes else short


def _family(path: Path) -> str:
    """The kind of model that a checkpoint has, without its head. Refuse what is not proven."""
    try:
        document = json.loads((path / "config.json").read_text())
        family = str((document.get("architectures") or ["unknown"])[0])
    except (OSError, ValueError, AttributeError, LookupError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read: {error}") from error
    for head in _HEADS:
        if family.endswith(head):
            family = f"{family.removesuffix(head)}Model"
    if family not in (*ENCODERS, *DECODERS):
        proven = ", ".join((*ENCODERS, *DECODERS))
        raise ValueError(
            f"{family} is not among the proven families ({proven}); serve it elsewhere and point "
            "an `upstream` entry at it"
        )
    return family


def _read_model(path: Path, options: Options) -> Any:
    noise: Any = library_logging
    noise.disable_progress_bar()
    noise.disable_default_handler()
    noise.enable_propagation()
    try:
        loaded: Any = AutoModel.from_pretrained(
            path,
            dtype=options.torch_dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {error}") from error
    model, report = loaded
    # A pooler that the checkpoint does not have is never used; anything else would be random.
    missing = [key for key in report["missing_keys"] if "pooler" not in str(key)]
    if missing:
        raise ValueError(
            f"the weights in {path} do not fit config.json: {len(missing)} missing, "
            f"{min(map(str, missing))} among them"
        )
    return model.to(options.torch_device).requires_grad_(False).eval()
