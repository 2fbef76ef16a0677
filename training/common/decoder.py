"""Decoders with Qwen3's architecture, for chat and music: creation, training steps and saving.

Matrices are trained with Muon (K. Jordan, 2024), the rest with AdamW.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

Optimizers: TypeAlias = tuple[torch.optim.Optimizer, ...]
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64."""

SAVED_S: Final = 240
"""Interval between two saves."""

_IGNORED: Final = -100
"""Target that the loss ignores."""


def make_decoder(
    tokenizer: Any, *, vocabulary: int, layers: int, intermediate: int, context: int
) -> Any:
    shape: dict[str, Any] = {"rope_theta": 10_000.0}
    config = Qwen3Config(
        **shape,
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def make_optimizers(model: Any, rate: float) -> Optimizers:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return (
        torch.optim.Muon(
            matrices, lr=rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    )


def fill_batch(rows: Sequence[tuple[list[int], list[bool]]], width: int) -> Batch:
    """Return inputs and targets ``(rows, width)`` from tokens and which of them count.

    Targets that do not count are -100, which the loss ignores.
    """
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), _IGNORED)
    for row, (ids, counted) in enumerate(rows):
        tokens = torch.tensor(ids[: width + 1])
        counts = torch.tensor(counted[1 : len(tokens)])
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(counts)][counts] = tokens[1:][counts]
    return inputs, targets


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the loss; logits are computed for the targets that count only."""
    counted = targets != _IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(states[counted])
    return F.cross_entropy(logits.float(), targets[counted])


def train_decoder(
    model: Any,
    optimizers: Optimizers,
    batches: Iterable[Batch],
    *,
    minutes: float,
    rate: float,
    decay: Callable[[float], float],
    save: Callable[[], None],
    report_every: int,
) -> tuple[int, int, float]:
    """Train for a number of minutes; save every few minutes and at the end.

    ``decay`` maps the elapsed fraction of the time to a factor of the learning rate. Return the
    number of steps, that of tokens with padding, and a running mean of the loss.
    """
    started = saved = time.monotonic()
    steps, tokens, mean = 0, 0, 0.0
    for inputs, targets in batches:
        elapsed = (time.monotonic() - started) / 60 / minutes
        if elapsed >= 1:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (steps + 1) / 50) * max(0.02, decay(elapsed))
        loss = loss_of(model, inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps, tokens = steps + 1, tokens + inputs.numel()
        mean = loss.item() if steps == 1 else 0.98 * mean + 0.02 * loss.item()
        if steps % report_every == 0:
            speed = tokens / (time.monotonic() - started)
            print(f"step {steps} loss {mean:.4f} {speed:.0f} tokens/s", flush=True)
        if time.monotonic() - saved > SAVED_S:
            saved = time.monotonic()
            save()
    save()
    return steps, tokens, mean


def save_decoder(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the directory, weights in bfloat16."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    model.save_pretrained(out, state_dict=state)
    tokenizer.save_pretrained(out)
    # The library writes the dtype that the model was trained in, not that of the saved weights.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
