"""Creates tiny random checkpoints of every supported family, with reference answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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


@dataclass(frozen=True)
class Style:
    """How a family marks its turns: dedicated tokens, and a template that writes them."""

    special: tuple[str, ...]
    added: tuple[str, ...]
    """Tokens of the vocabulary that are not special."""
    template: str


_CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{{- '<tools>' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}"
    "{{- '\\n</tools>\\nAnswer <tool_call>\\n{...}\\n</tool_call><|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first and tools %}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}"
    "{{- '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + ((' ' + m.name) if m.name else '') + '\\n' }}"
    "{%- set said = m.content | trim %}{{- said }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN3 = _CHATML.replace(
    "{%- set said = m.content | trim %}{{- said }}",
    "{%- set said = m.content %}{%- set why = '' %}"
    "{%- if m.reasoning_content is string %}{% set why = m.reasoning_content %}"
    "{%- elif m.role == 'assistant' and '</think>' in m.content %}"
    "{%- set why = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}"
    "{%- set why = why.lstrip('\\n') %}"
    "{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{%- if why and loop.last %}{{- '<think>\\n' + why + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- said }}",
)
_TURNS = (
    "{%- for m in messages %}{{- BEGIN + m.role + END_OF_ROLE + m.content | trim }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
    "{{- c.function.arguments | tojson + '}' }}{% endfor %}"
    "{%- if m.name %}{{ ' by ' + m.name }}{% endif %}{{- END }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- BEGIN + 'assistant' + END_OF_ROLE }}{% endif %}"
)
_TOOLS = "{%- for t in tools or [] %}{{ t | tojson(indent=4) + '\\n\\n' }}{% endfor %}"


def _turns(begin: str, end_of_role: str, end: str) -> str:
    values = {"BEGIN": begin, "END_OF_ROLE": end_of_role, "END": end}
    return "".join(f"{{%- set {key} = '{text}' %}}" for key, text in values.items()) + _TURNS


STYLES = {
    "llama": Style(
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        (),
        "{{- '<|begin_of_text|>' }}"
        + _TOOLS
        + '{%- if tools %}{{ \'Call with {"name": , "parameters": }\' }}{% endif %}'
        + _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>"),
    ),
    "qwen2": Style(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<|fim_prefix|>"),
        _CHATML,
    ),
    "qwen3": Style(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        (
            *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<think>", "</think>"),
        ),
        _QWEN3,
    ),
    "mistral": Style(
        ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
        (),
        "{{- '<s>' }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}"
        "{{- '[/AVAILABLE_TOOLS]' }}{% endif %}{%- for m in messages %}"
        "{%- if m.role == 'assistant' %}{{- ' ' + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + c.function.name + ' ' }}"
        "{{- c.function.arguments | tojson }}{% endfor %}{{- '</s>' }}"
        "{%- else %}{{- '[INST] ' + (m.name + ': ' if m.name else '') + m.content + '[/INST]' }}"
        "{%- endif %}{% endfor %}",
    ),
    "phi3": Style(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
        (),
        _TOOLS
        + "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}"
        + "{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{% endfor %}"
        + "{%- if m.name %}{{- ' ' + m.name }}{% endif %}{{- '<|end|>\\n' }}{% endfor %}"
        + "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}",
    ),
    "gemma3": Style(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("\n\n", "<b>", "</b>"),
        "{{- '<bos>' }}" + _TOOLS + _turns("<start_of_turn>", "\\n", "<end_of_turn>\\n"),
    ),
}


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


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "num_key_value_heads": 4,
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
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return MixtralForCausalLM(MixtralConfig(**experts, **shape))
        case "qwen3moe":
            experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
            return Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**experts, norm_topk_prob=True, head_dim=16, **shape)
            )
        case "deepseek2":
            routing = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 3}
            return DeepseekV2ForCausalLM(
                DeepseekV2Config(**{**shape, **_LATENT, **routing, "q_lora_rank": None, **changes})
            )
        case "deepseek3":
            experts = {"num_experts_per_tok": 3, "first_k_dense_replace": 0, "q_lora_rank": 24}
            return DeepseekV3ForCausalLM(
                DeepseekV3Config(**{**shape, **_LATENT, **experts, **changes})
            )
        case "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(vocab_size=vocabulary, n_embd=48, n_layer=1, n_head=4)
            )
    raise AssertionError(family)


def make_tokenizer(template: str | None = TEMPLATE, *, alphabet: bool = True) -> Any:
    """Train a byte-level tokenizer on a sentence; without ``alphabet`` it has no other bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "</s>", "<user>", "<assistant>", "<system>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=template
    )


def make_marked_tokenizer(family: str, *, special_calls: bool = False) -> Any:
    """Create a tokenizer in which a family's markers are one token each, as in published ones."""
    style = STYLES[family]
    tokenizer = make_tokenizer(style.template)
    special = [*style.special, *(text for text in style.added if special_calls)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in style.added
            if not special_calls
        ]
    )
    return tokenizer


def make_checkpoint(
    family: str,
    path: Path,
    *,
    template: str | None = TEMPLATE,
    tokenizer: Any = None,
    **changes: Any,
) -> Path:
    """Write a random model, with ``changes`` to its configuration, and a tokenizer."""
    wrapped = tokenizer or make_tokenizer(template)
    torch.manual_seed(7)
    model = make_model(family, len(wrapped), **changes)
    for name, parameter in model.named_parameters():
        if parameter.ndim in (2, 3) and "embed" not in name:
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
    """The library's own greedy generation, without the engine."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def generate(self, content: str, tokens: int) -> tuple[int, int, str]:
        """Return the numbers of input and output tokens, and the text."""
        ids = self._prompt(content)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )[0, ids.shape[1] :]
        return ids.shape[1], len(out), self.tokenizer.decode(out, skip_special_tokens=True)

    def continue_text(self, text: str, tokens: int) -> str:
        """Continue a raw prompt."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        continuation: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return continuation

    def logprobs(self, content: str) -> torch.Tensor:
        """Return the log probabilities ``(vocabulary,)`` of the answer's first token."""
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
