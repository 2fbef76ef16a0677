"""Trains ``pocket-music``, a decoder of Qwen3's shape, on tunes composed by ``tunes``.

    python -m training.music.train --minutes 60 --out workers/pocket/music

A sample is a caption and the tune that it is true of, both as tokens (``notes``); the loss counts
the tune only. Matrices are trained with Muon (K. Jordan, 2024), the rest with AdamW. A run saves as
it goes, the optimizers' state beside the weights, and ``--resume`` goes on from there; the rate
falls over the last ``--cooling`` of a stretch, none of it where more stretches are to come.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.music.tunes import tune
from workers.engines.music.notes import END, HEADER, MARKS, PAD, PROMPT, TOKENS, UNKNOWN, encode
from workers.engines.music.prompt import caption, known_words, parse_prompt

CONTEXT: Final = 640
"""Tokens that a sample has at most, and that the model can look back on; a longer tune is cut."""
ROWS: Final = 4
PADDED: Final = 16
"""The vocabulary is a multiple of so many."""
HEAD: Final = 1 + len(HEADER)
"""Tokens before the first bar of a tune."""
RATE: Final = 0.003
STATE: Final = "optimizers.pt"
_HELD_OUT: Final = 1_000_003
"""Seed of the samples that are never trained on."""


def make_tokenizer() -> Any:
    """Tokens between blanks: marks, music, and the words of captions."""
    vocabulary = {said: place for place, said in enumerate((*MARKS, *TOKENS, *known_words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any) -> Any:
    shape: dict[str, Any] = {"rope_theta": 10_000.0}
    config = Qwen3Config(
        **shape,
        vocab_size=-(-len(tokenizer) // PADDED) * PADDED,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def make_sample(tokenizer: Any, r: random.Random) -> tuple[list[int], int]:
    """A caption and its tune as tokens, and where the tune begins."""
    piece = tune(r)
    said = [PROMPT, *parse_prompt(caption(piece, r)).words]
    ids: list[int] = tokenizer.convert_tokens_to_ids([*said, *encode(piece)])
    return ids, len(said)


def batches(tokenizer: Any, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets), (ROWS, CONTEXT) int64, targets that do not count -100.

    A sample that is longer than a row is cut anywhere: what follows the cut is learnt with the
    caption and header before it, as an engine writes on whose context is full.
    """
    r = random.Random(seed)
    while True:
        inputs = torch.zeros(ROWS, CONTEXT, dtype=torch.long)
        targets = torch.full((ROWS, CONTEXT), -100)
        for row in range(ROWS):
            ids, counted = _row(tokenizer, r)
            tokens = torch.tensor(ids[: CONTEXT + 1])
            counts = torch.tensor(counted[1 : len(tokens)])
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(counts)][counts] = tokens[1:][counts]
        yield inputs, targets


def _row(tokenizer: Any, r: random.Random) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    counted: list[bool] = []
    while len(ids) < CONTEXT * 0.8:
        more, begin = make_sample(tokenizer, r)
        marks = [place > begin for place in range(len(more))]
        room = CONTEXT + 1 - len(ids)
        head = begin + HEAD
        if len(more) > room and room == CONTEXT + 1 and r.random() < 0.6:
            cut = _cut(tokenizer, more, head, len(more) - (room - head), r)
            more, marks = more[:head] + more[cut:], marks[:head] + marks[cut:]
        ids += more
        counted += marks
    return ids, counted


def _cut(tokenizer: Any, ids: list[int], head: int, latest: int, r: random.Random) -> int:
    """Choose a bar with which a tune may go on after its header."""
    marks = _bar_ids(tokenizer)
    begins = [at for at in range(head, len(ids)) if ids[at] in marks and at <= latest]
    return r.choice(begins)


def _bar_ids(tokenizer: Any) -> frozenset[int]:
    kinds = ("<intro:", "<a:", "<b:", "<outro:")
    return frozenset(
        tokenizer.convert_tokens_to_ids([said for said in TOKENS if said.startswith(kinds)])
    )


def optimizers_of(model: Any) -> tuple[torch.optim.Optimizer, ...]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return (
        torch.optim.Muon(
            matrices, lr=RATE, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )


def train(
    model: Any,
    tokenizer: Any,
    optimizers: tuple[torch.optim.Optimizer, ...],
    *,
    minutes: float,
    cooling: float,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Train for a time; save every few minutes and at the end."""
    started = saved = time.monotonic()
    steps, recent = 0, 0.0
    for inputs, targets in batches(tokenizer, seed):
        elapsed = (time.monotonic() - started) / 60 / minutes
        if elapsed >= 1:
            break
        part = min(1.0, (1 - elapsed) / cooling) if cooling else 1.0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (steps + 1) / 50) * max(0.02, part)
        loss = loss_of(model, inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        recent = loss.item() if steps == 1 else 0.98 * recent + 0.02 * loss.item()
        if steps % 50 == 0:
            speed = steps * ROWS * CONTEXT / (time.monotonic() - started)
            print(f"step {steps} loss {recent:.4f} {speed:.0f} tokens/s", flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            save(model, tokenizer, optimizers, out)
    save(model, tokenizer, optimizers, out)
    held_out = validate(model, tokenizer)
    return {"steps": steps, "tokens": steps * ROWS * CONTEXT, "loss": recent, "held_out": held_out}


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: Any, tokenizer: Any, *, count: int = 10) -> float:
    """The mean loss on samples of a seed that training never uses."""
    samples = batches(tokenizer, _HELD_OUT)
    losses = [loss_of(model, *next(samples)).item() for _ in range(count)]
    return sum(losses) / len(losses)


def save(
    model: Any, tokenizer: Any, optimizers: tuple[torch.optim.Optimizer, ...], out: Path
) -> None:
    """Write the directory, weights in bfloat16; and what a further stretch needs, in ``out``.run"""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    model.save_pretrained(out, state_dict=state)
    tokenizer.save_pretrained(out)
    # The library writes the type that the model was trained in, not that of the weights given.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    kept = out.with_suffix(".run")
    kept.mkdir(exist_ok=True)
    document = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(document, kept / f"{STATE}.new")
    (kept / f"{STATE}.new").replace(kept / STATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="another in every stretch")
    parser.add_argument("--cooling", type=float, default=0.5, help="part in which the rate falls")
    parser.add_argument("--resume", action="store_true", help="go on from what --out.run holds")
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/music"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizers = optimizers_of(model)
    if options.resume:
        document = torch.load(options.out.with_suffix(".run") / STATE, weights_only=True)
        model.load_state_dict(document["model"])
        for optimizer, state in zip(optimizers, document["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    figures: dict[str, Any] = {"parameters": parameters, "seed": options.seed}
    figures |= train(
        model,
        tokenizer,
        optimizers,
        minutes=options.minutes,
        cooling=options.cooling,
        seed=options.seed,
        out=options.out,
    )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
