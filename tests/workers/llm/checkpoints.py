"""Tiny random checkpoints of every proven family, made on the spot, and a way to step an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
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

from workers.contract.jobs import ChatInput, ChatMessage, Job, Outcome, RequestId, Tokens
from workers.contract.models import ModelSpec
from workers.engines.llm.engine import LlmEngine
from workers.engines.protocol import Admission, Phase

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "the quick brown fox jumps over a lazy dog and counts to 0123456789 äöü ☂ 漢字 . , ! ? "

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_model(family: str, vocabulary: int) -> Any:
    shape = {**_SHAPE, "vocab_size": vocabulary}
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**shape))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**shape))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
        case "mistral":
            return MistralForCausalLM(MistralConfig(sliding_window=None, **shape))
        case "phi3":
            return Phi3ForCausalLM(Phi3Config(**shape))
        case "gemma3":
            return Gemma3ForCausalLM(
                Gemma3TextConfig(head_dim=16, sliding_window=256, query_pre_attn_scalar=16, **shape)
            )
        case "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(vocab_size=vocabulary, n_embd=48, n_layer=1, n_head=4)
            )
    raise AssertionError(family)


def make_checkpoint(family: str, path: Path) -> Path:
    """Write a random model with a byte-level tokenizer and a chat template."""
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
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    torch.manual_seed(7)
    model = make_model(family, len(wrapped))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            # Sharper than a fresh initialisation, so that greedy choices are far from ties.
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
    return path


def make_engine(path: Path, **options: Any) -> LlmEngine:
    limits = (
        {"context_tokens": options.pop("context_tokens")} if "context_tokens" in options else {}
    )
    spec = ModelSpec(
        name="tiny",
        task="text-generation",
        engine="llm",
        checkpoint=str(path),
        options={"slots": 4, **options},
        limits=limits,
    )
    engine = LlmEngine(spec)
    engine.load()
    return engine


def job(name: str, content: str, *, stream: bool = True, **chat: Any) -> Job:
    given = {"max_tokens": 12, "temperature": 0.0, **chat}
    value = ChatInput(messages=(ChatMessage("user", content),), **given)
    return Job(
        request_id=RequestId(name),
        account_id="1",
        model="tiny",
        task="text-generation",
        input=msgspec.to_builtins(value),
        stream=stream,
    )


class Clock:
    """A phase clock that only remembers which phases there were."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self.phases.append(name)
        yield


class Driver:
    """Steps an engine as the loop does, and keeps what it reports."""

    def __init__(self, engine: LlmEngine) -> None:
        self.engine = engine
        self.clock = Clock()
        self.outcomes: dict[str, Outcome] = {}
        self.texts: dict[str, str] = {}

    def admit(self, wanted: Job) -> Admission:
        return self.engine.admit(wanted, self.clock)

    def step(self) -> Mapping[RequestId, float]:
        report = self.engine.step(self.clock)
        for id, event in report.events:
            assert isinstance(event, Tokens)
            place = f"{id}/{event.index}"
            self.texts[place] = self.texts.get(place, "") + event.text
        for id, outcome in report.outcomes:
            assert id not in self.outcomes, "a request ends once"
            self.outcomes[id] = outcome
            self.engine.release(id)
        return report.weights

    def finish(self, *names: str) -> None:
        for _ in range(600):
            if all(name in self.outcomes for name in names):
                return
            self.step()
        raise AssertionError(f"{names} did not end")


def run_alone(engine: LlmEngine, wanted: Job) -> Outcome:
    driver = Driver(engine)
    driver.admit(wanted)
    driver.finish(wanted.request_id)
    return driver.outcomes[wanted.request_id]


def texts(outcome: Outcome) -> Sequence[str]:
    return [choice["text"] for choice in msgspec.to_builtins(outcome)["output"]["choices"]]
