"""Trains ``pocket-music``, a decoder with Qwen3's architecture, on tunes composed by ``tunes``.

    python -m training.music.train --minutes 60 --out workers/pocket/music

A sample is a caption and the tune that it describes, both as tokens (``notes``); the loss counts
the tune only. A run periodically saves the weights and the optimizers' state, from which
``--resume`` continues. The learning rate decays in the last fraction ``--cooling`` of a run; 0
keeps it constant, if more runs follow.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.common.decoder import (
    Batch,
    Optimizers,
    fill_batch,
    loss_of,
    make_decoder,
    make_optimizers,
    save_decoder,
    train_decoder,
)
from training.common.split import choose
from training.music.samples import describe
from workers.engines.music.notes import END, HEADER, MARKS, PAD, PROMPT, TOKENS, UNKNOWN, encode
from workers.engines.music.prompt import known_words, parse_prompt

CONTEXT: Final = 640
"""Maximum tokens of a sample, and the model's context; longer tunes are cut."""
ROWS: Final = 4
PADDED: Final = 16
"""Number of which the vocabulary's size is a multiple."""
HEAD: Final = 1 + len(HEADER)
"""Tokens before the first bar of a tune."""
RATE: Final = 0.003
STATE: Final = "optimizers.pt"
_HELD_OUT: Final = 1_000_003
"""Seed of the held-out samples."""


def make_tokenizer() -> Any:
    """Create a tokenizer that splits at blanks: control marks, music, and words of captions."""
    vocabulary = {token: id for id, token in enumerate((*MARKS, *TOKENS, *known_words()))}
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
    vocabulary = -(-len(tokenizer) // PADDED) * PADDED
    return make_decoder(
        tokenizer, vocabulary=vocabulary, layers=6, intermediate=512, context=CONTEXT
    )


def make_sample(
    tokenizer: Any, r: random.Random, *, held_out: bool = False
) -> tuple[list[int], int]:
    """Return the tokens of a caption and its tune, and the index at which the tune begins."""
    made = choose(partial(describe, r), held_out=held_out)
    prompt = [PROMPT, *parse_prompt(made.caption).words]
    ids: list[int] = tokenizer.convert_tokens_to_ids([*prompt, *encode(made.piece)])
    return ids, len(prompt)


def batches(tokenizer: Any, seed: int, *, held_out: bool = False) -> Iterator[Batch]:
    """Yield (inputs, targets), ``(ROWS, CONTEXT)`` int64; targets that the loss ignores are -100.

    From a sample that is longer than a row, bars after the header are removed, so that the rest is
    learned after caption and header, as when an engine continues with a full context.
    """
    r = random.Random(seed)
    while True:
        yield fill_batch([_row(tokenizer, r, held_out=held_out) for _ in range(ROWS)], CONTEXT)


def _row(tokenizer: Any, r: random.Random, *, held_out: bool) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    counted: list[bool] = []
    while len(ids) < CONTEXT * 0.8:
        more, begin = make_sample(tokenizer, r, held_out=held_out)
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
    """Choose a bar with which a tune can continue after its header."""
    marks = _bar_ids(tokenizer)
    begins = [at for at in range(head, len(ids)) if ids[at] in marks and at <= latest]
    return r.choice(begins)


def _bar_ids(tokenizer: Any) -> frozenset[int]:
    kinds = ("<intro:", "<a:", "<b:", "<outro:")
    return frozenset(
        tokenizer.convert_tokens_to_ids([token for token in TOKENS if token.startswith(kinds)])
    )


def train(
    model: Any,
    tokenizer: Any,
    optimizers: Optimizers,
    *,
    minutes: float,
    cooling: float,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    steps, tokens, loss = train_decoder(
        model,
        optimizers,
        batches(tokenizer, seed),
        minutes=minutes,
        rate=RATE,
        decay=lambda elapsed: min(1.0, (1 - elapsed) / cooling) if cooling else 1.0,
        save=lambda: save(model, tokenizer, optimizers, out),
        report_every=50,
    )
    held_out = validate(model, tokenizer)
    return {"steps": steps, "tokens": tokens, "loss": loss, "held_out": held_out}


@torch.no_grad()
def validate(model: Any, tokenizer: Any, *, count: int = 10) -> float:
    """Return the mean loss on held-out samples."""
    samples = batches(tokenizer, _HELD_OUT, held_out=True)
    losses = [loss_of(model, *next(samples)).item() for _ in range(count)]
    return sum(losses) / len(losses)


def save(model: Any, tokenizer: Any, optimizers: Optimizers, out: Path) -> None:
    """Write the directory, weights in bfloat16, and the state for ``--resume`` into ``out``.run."""
    save_decoder(model, tokenizer, out)
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
    parser.add_argument("--seed", type=int, default=1, help="use another in each run")
    parser.add_argument(
        "--cooling", type=float, default=0.5, help="fraction of the run in which the rate decays"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the state in OUT.run")
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/music"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizers = make_optimizers(model, RATE)
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
