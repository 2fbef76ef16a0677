"""Compares precisions: size of the weights, tokens per second, perplexity.

The checkpoint is ``pocket-chat``, or the directory in ``BENCH_CHECKPOINT``; the device is a CPU, or
that in ``BENCH_DEVICE``. Each precision is
loaded as in the engine; those that the engine does not support on this device are reported. The
text is the assistant's part of dialogues with a seed that training never uses. Small models are
limited by Python rather than memory, so speed is also measured with a decoder of random weights
that is larger than the CPU caches.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from gateway.plan.this_machine import measure_bandwidth
from training.chat.data import dialogue
from training.chat.score import SEED
from training.chat.train import encode
from workers.contract.models import ModelSpec
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.options import read_options
from workers.engines.precision import weight_bytes

POCKET: Final = Path(__file__).parents[1] / "workers" / "pocket" / "chat"
DEVICE: Final = os.environ.get("BENCH_DEVICE", "cpu")
PRECISIONS: Final = ("float32", "bfloat16", "int8", "fp8")
DIALOGUES: Final = 100
BATCHES: Final = (1, 8)
PROMPT: Final = 32
SECONDS: Final = 2.0
STEPS_MIN: Final = 5
STEPS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Text:
    """Ids ``(1, tokens)`` int64, and a mask of the predicted ones that count ``(tokens - 1,)``."""

    ids: torch.Tensor
    counted: torch.Tensor


def main() -> None:
    chosen = Path(os.environ.get("BENCH_CHECKPOINT", POCKET))
    print(
        f"\nprecision: threads {torch.get_num_threads()}; all cores together copy "
        f"{measure_bandwidth() / 1e9:.1f} GB/s"
    )
    titles = "".join(f"{f'tok/s at {batch}':>12}" for batch in BATCHES)
    print(
        f"{'model':<12}{'precision':<10}{'weights MB':>11}{titles}{'weights GB/s':>14}{'ppl':>10}"
    )
    measure(chosen.name, chosen, list(texts(chosen)))
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        write_large(Path(folder))
        measure("random", Path(folder), [])


def measure(name: str, path: Path, held_out: list[Text]) -> None:
    for precision in PRECISIONS:
        spec = ModelSpec(
            name, "text-generation", "llm", str(path), {"dtype": precision, "device": DEVICE}
        )
        try:
            model = Checkpoint(spec, read_options(spec)).model
        except ValueError as error:
            print(f"{name:<12}{precision:<10} not supported: {error}")
            continue
        # The engine has its own attention and cache; here all use the library's.
        model.set_attn_implementation("sdpa")
        size = weight_bytes(model)
        rates = [decode_rate(model, batch) for batch in BATCHES]
        cells = "".join(f"{rate:>12,.1f}" for rate in rates)
        read = rates[0] * size / 1e9
        quality = f"{perplexity(model, held_out):>10.4f}" if held_out else f"{'-':>10}"
        print(f"{name:<12}{precision:<10}{size / 1e6:>11,.1f}{cells}{read:>14.1f}{quality}")


def texts(path: Path) -> Iterator[Text]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    r = random.Random(SEED)
    for _ in range(DIALOGUES):
        ids, counted = encode(tokenizer, dialogue(r))
        yield Text(torch.tensor([ids]), torch.tensor(counted[1:]))


@torch.inference_mode()
def perplexity(model: Any, held_out: list[Text]) -> float:
    total, count = 0.0, 0
    for text in held_out:
        ids, counted = text.ids.to(model.device), text.counted.to(model.device)
        logits = model(ids).logits[0, :-1].float()[counted]
        targets = ids[0, 1:][counted]
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        count += len(targets)
    return math.exp(total / count)


@torch.inference_mode()
def decode_rate(model: Any, batch: int) -> float:
    """Measure tokens per second of all sequences, by the fastest tenth of the steps.

    Other load on the machine only makes steps slower.
    """
    prompt = torch.arange(3, 3 + PROMPT, device=model.device).expand(batch, PROMPT)
    past = model(prompt, use_cache=True).past_key_values
    last, took = prompt[:, -1:], list[float]()
    while len(took) < STEPS_MIN or (sum(took) < SECONDS and len(took) < STEPS_MAX):
        started = time.perf_counter()
        model(last, past_key_values=past, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    fastest = sorted(took)[: max(1, len(took) // 10)]
    return batch / statistics.mean(fastest)


def write_large(path: Path) -> None:
    """Save a decoder with random weights, half a gigabyte in bfloat16."""
    tokenizer: Any = AutoTokenizer.from_pretrained(POCKET)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
