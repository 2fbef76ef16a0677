"""Tiny random checkpoints of every proven family, made on the spot, and what they should say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workers.contract.models import ModelSpec
from workers.engines.llm.engine import LlmEngine

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}<system>{{ tools | tojson }} use <tool_call></s>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "the quick brown fox jumps over a lazy dog and counts to 0123456789 äöü ☂ 漢字 . , ! ? "

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_model(family: str, vocabulary: int, **changes: Any) -> Any:
    shape = {**_SHAPE, "vocab_size": vocabulary, **changes}
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**shape))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**shape))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
        case "mistral":
            return MistralForCausalLM(MistralConfig(**{"sliding_window": None, **shape}))
        case "phi3":
            return Phi3ForCausalLM(Phi3Config(**shape))
        case "gemma3":
            return Gemma3ForCausalLM(
                Gemma3TextConfig(
                    **{"sliding_window": 256, "head_dim": 16, "query_pre_attn_scalar": 16, **shape}
                )
            )
        case "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(vocab_size=vocabulary, n_embd=48, n_layer=1, n_head=4)
            )
    raise AssertionError(family)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Train a byte-level tokenizer on a sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "</s>", "<user>", "<assistant>", "<system>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=template
    )


def make_checkpoint(
    family: str, path: Path, *, template: str | None = TEMPLATE, **changes: Any
) -> Path:
    """Write a random model, its configuration changed as asked, with a tokenizer."""
    wrapped = make_tokenizer(template)
    torch.manual_seed(7)
    model = make_model(family, len(wrapped), **changes)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            # Sharper than a fresh initialisation, so that greedy choices are far from ties.
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
    return path


def make_spec(path: Path | None, *, context_tokens: Any = None, **options: Any) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        task="text-generation",
        engine="llm",
        checkpoint=None if path is None else str(path),
        options={"slots": 4, "device": "cpu", **options},
        limits={} if context_tokens is None else {"context_tokens": context_tokens},
    )


def make_engine(path: Path, **options: Any) -> LlmEngine:
    engine = LlmEngine(make_spec(path, **options))
    engine.load()
    return engine


class Reference:
    """The library's own greedy generation, without any engine of ours."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def generate(self, content: str, tokens: int) -> tuple[int, int, str]:
        """Return how many tokens went in and came out, and the text."""
        ids = self._prompt(content)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )[0, ids.shape[1] :]
        return ids.shape[1], len(out), self.tokenizer.decode(out, skip_special_tokens=True)

    def continue_text(self, text: str, tokens: int) -> str:
        """What comes after a text that is no conversation."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        said: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return said

    def logprobs(self, content: str) -> torch.Tensor:
        """Log-probabilities ``(vocabulary,)`` of the first token of the answer."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(self._prompt(content)).logits[0, -1]
        return torch.log_softmax(logits, dim=-1)

    def _prompt(self, content: str) -> torch.Tensor:
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        ids: torch.Tensor = self.tokenizer(
            prompt, return_tensors="pt", add_special_tokens=False
        ).input_ids
        return ids
