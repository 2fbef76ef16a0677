"""Loads a cross-encoder and scores pairs of a query and a document.

Every problem of a checkpoint is a ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from workers.contract.models import ModelSpec
from workers.engines.checkpoints import (
    check_family,
    checkpoint_path,
    read_architecture,
    read_model,
    read_tokenizer,
)
from workers.engines.reranking.options import Options

FAMILIES: Final = tuple(
    f"{name}ForSequenceClassification"
    for name in ("Bert", "Roberta", "XLMRoberta", "MPNet", "ModernBert", "DistilBert", "Electra")
)
_OFFSET: Final = ("RobertaFor", "XLMRobertaFor", "MPNetFor")
"""Families whose positions start after that of the padding."""
_ALTERNATIVE: Final = "serve it elsewhere"


class Pair(NamedTuple):
    """A query and a document as one text of the model."""

    ids: list[int]
    types: list[int] | None
    """Which of the two each token belongs to; None for models that do not tell them apart."""


class CrossEncoderLayout:
    """What a checkpoint says of its model beside the weights. ``context`` is the maximum number of
    tokens of a pair."""

    def __init__(self, spec: ModelSpec) -> None:
        self.path = checkpoint_path(spec)
        _, family = read_architecture(self.path)
        check_family(family, FAMILIES, _ALTERNATIVE)
        self.tokenizer: Any = read_tokenizer(self.path)
        config = AutoConfig.from_pretrained(
            self.path, local_files_only=True, trust_remote_code=False
        )
        if config.num_labels != 1:
            raise ValueError(
                f"the model has {config.num_labels} outputs; a model for reranking has one"
            )
        positions = int(config.max_position_embeddings)
        if family.startswith(_OFFSET):
            positions -= int(config.pad_token_id) + 1
        context = spec.limits.get("context_tokens") or positions
        if context > positions:
            raise ValueError(
                f"limits.context_tokens is {context}, but the model supports {positions} positions"
            )
        self.context = int(context)


class CrossEncoder:
    """A loaded cross-encoder. ``context`` is the maximum number of tokens of a pair."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        layout = CrossEncoderLayout(spec)
        self._device = options.torch_device
        self._squashes = options.activation == "sigmoid"
        self.model: Any = read_model(AutoModelForSequenceClassification, layout.path, options)
        self._tokenizer = layout.tokenizer
        self.context = layout.context

    def encode(self, query: str, document: str) -> Pair:
        """Tokenize a query with a document, whose end is cut to the context.

        Raise ``ValueError`` if the query leaves no room for a document.
        """
        encoded = self._tokenizer(query, document, truncation=False, verbose=False)
        size = len(encoded["input_ids"])
        if size > self.context:
            own = len(self._tokenizer.encode(query, add_special_tokens=False))
            if own + self._tokenizer.num_special_tokens_to_add(pair=True) >= self.context:
                raise ValueError(f"it has {own} tokens; the context has {self.context}")
            encoded = self._tokenizer(
                query, document, truncation="only_second", max_length=self.context
            )
        return Pair(list(encoded["input_ids"]), encoded.get("token_type_ids"))

    def score(self, pairs: Sequence[Pair]) -> list[float]:
        """Return the scores of pairs, which are padded on the right."""
        longest = max(len(pair.ids) for pair in pairs)
        pad = getattr(self.model.config, "pad_token_id", None) or 0
        ids = torch.full((len(pairs), longest), pad, dtype=torch.long)
        mask = torch.zeros(len(pairs), longest, dtype=torch.long)
        types = torch.zeros(len(pairs), longest, dtype=torch.long)
        for row, pair in enumerate(pairs):
            ids[row, : len(pair.ids)] = torch.tensor(pair.ids)
            mask[row, : len(pair.ids)] = 1
            if pair.types is not None:
                types[row, : len(pair.ids)] = torch.tensor(pair.types)
        given = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        if pairs[0].types is not None:
            given["token_type_ids"] = types.to(self._device)
        scores = self.model(**given).logits[:, 0].float()
        found: list[float] = (scores.sigmoid() if self._squashes else scores).tolist()
        return found
