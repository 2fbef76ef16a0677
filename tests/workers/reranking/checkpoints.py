"""Tiny random cross-encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from tests.workers.llm.checkpoints import make_tokenizer

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODELS: dict[str, Any] = {
    "bert": (BertForSequenceClassification, BertConfig),
    "xlm": (XLMRobertaForSequenceClassification, XLMRobertaConfig),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig),
}


def make_checkpoint(path: Path, family: str = "bert", *, labels: int = 1) -> Path:
    """Write a random model and a tokenizer that marks pairs."""
    tokenizer = make_tokenizer(None)
    tokenizer.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    ids = tokenizer.get_vocab()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(name, ids[name]) for name in ("<cls>", "<sep>")],
    )
    tokenizer.model_input_names = (
        ["input_ids", "token_type_ids", "attention_mask"]
        if family == "bert"
        else ["input_ids", "attention_mask"]
    )
    model, config = MODELS[family]
    torch.manual_seed(3)
    made = model(config(vocab_size=len(tokenizer), num_labels=labels, **_SHAPE))
    for parameter in made.classifier.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.0)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
