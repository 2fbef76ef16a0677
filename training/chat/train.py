"""Trains ``pocket-chat``, a decoder with Qwen3's architecture, on dialogues from ``data.py``.

    python -m training.chat.train --minutes 45 --out workers/pocket/chat

The result is a directory that transformers, vLLM and llama.cpp load: weights in bfloat16, a
byte-level BPE tokenizer that splits digits, and a chat template in Qwen's format. The loss counts
the assistant's tokens only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from training.chat.data import dialogue
from training.chat.score import QUESTIONS, load, score
from training.chat.skills import Dialogue
from training.common.decoder import (
    Batch,
    fill_batch,
    make_decoder,
    make_optimizers,
    save_decoder,
    train_decoder,
)

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
TEMPLATE: Final = (
    "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}"
    "{%- else -%}{%- set system = '' -%}{%- endif -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') -}}"
    "{{- '# Tools\\nYou may call these functions:\\n<tools>\\n' -}}"
    "{%- for tool in tools -%}{{- tool.function | tojson + '\\n' -}}{%- endfor -%}"
    "{{- '</tools>\\nCall one so:\\n<tool_call>\\n' -}}"
    '{{- \'{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' and loop.first and tools -%}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content -}}"
    "{{- '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n' -}}"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}"
    "{{- '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Qwen's chat template, shortened; ``skills.system_prompt`` renders tools in the same way."""
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenizer, which every engine knows by name. Digits are separate tokens, so that sums
are computed digit by digit."""
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that are ordinary text, not control tokens."""
VOCABULARY: Final = 2048
ROW: Final = 512
"""Maximum length of a dialogue in tokens; the rest is cut off."""
TOKENS: Final = 3840
"""Tokens of a batch, with padding."""
POOL: Final = 1500
"""Dialogues that are sorted by length into batches."""
RATE: Final = 0.003


def train_tokenizer(seed: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    r = random.Random(seed)
    texts = (text for _ in range(20_000) for _, text in dialogue(r))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any) -> Any:
    model = make_decoder(
        tokenizer, vocabulary=len(tokenizer), layers=7, intermediate=576, context=1024
    )
    # Rows are short: a third faster than the fused attention, which is made for long ones.
    model.set_attn_implementation("eager")
    return model


def encode(tokenizer: Any, turns: Dialogue) -> tuple[list[int], list[bool]]:
    """Return a dialogue's tokens in the template's format, and which of them the loss counts."""
    ids: list[int] = []
    counted: list[bool] = []
    for role, content in turns:
        head = tokenizer.encode(f"{START}{role}\n")
        body = tokenizer.encode(f"{content}{END}")
        tail = tokenizer.encode("\n")
        ids += head + body + tail
        mine = role == "assistant"
        counted += [False] * len(head) + [mine] * len(body) + [False] * len(tail)
    return ids, counted


def batches(tokenizer: Any, seed: int) -> Iterator[Batch]:
    """Yield (inputs, targets) of at most ``TOKENS`` tokens, int64, one dialogue in each row.

    Dialogues of similar length share a batch, so that little is padded. Targets that the loss
    ignores are -100.
    """
    r = random.Random(seed)
    while True:
        rows = sorted((encode(tokenizer, dialogue(r)) for _ in range(POOL)), key=_length)
        found: list[Batch] = []
        while rows:
            width = min(ROW, _length(rows[-1]) - 1)
            found.append(fill_batch(rows[-(TOKENS // width) :], width))
            del rows[-(TOKENS // width) :]
        r.shuffle(found)
        yield from found


class Dialogues(IterableDataset[Batch]):
    """Batches that another process makes, which takes a third of the time of training on them."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        return batches(self._tokenizer, self._seed)


def _length(row: tuple[list[int], list[bool]]) -> int:
    return len(row[0])


def train(
    model: Any,
    tokenizer: Any,
    *,
    minutes: float,
    rate: float,
    seed: int,
    out: Path,
    resumed: bool,
) -> dict[str, Any]:
    """Train; the learning rate decays in the second half, or all the time if resumed."""
    steps, tokens, loss = train_decoder(
        model,
        make_optimizers(model, rate),
        DataLoader(Dialogues(tokenizer, seed), batch_size=None, num_workers=1, prefetch_factor=64),
        minutes=minutes,
        rate=rate,
        decay=lambda elapsed: 1 - (elapsed if resumed else max(0.0, 2 * elapsed - 1)),
        save=lambda: save_decoder(model, tokenizer, out),
        report_every=100,
    )
    return {
        "steps": steps,
        "tokens": tokens,
        "loss": round(loss, 4),
        "minutes": minutes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="nearly twice as fast; needs a C++ compiler"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--resume", type=Path, help="directory to continue from, with a decaying rate"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="directory whose tokenizer new weights are trained for"
    )
    parser.add_argument("--rate", type=float, default=RATE, help="highest learning rate")
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/chat"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.resume is None:
        if options.tokenizer is None:
            tokenizer = train_tokenizer(options.seed)
        else:
            tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        model = make_model(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.resume)
        model = Qwen3ForCausalLM.from_pretrained(
            options.resume, dtype=torch.float32, attn_implementation="eager"
        )
    if options.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    figures: dict[str, Any] = {"parameters": parameters, "seed": options.seed}
    figures |= train(
        model,
        tokenizer,
        minutes=options.minutes,
        rate=options.rate,
        seed=options.seed,
        out=options.out,
        resumed=options.resume is not None,
    )
    engine = load(options.out)
    figures["right"] = {
        skill: [str(score(engine, skill, 100, held_out=side)) for side in (False, True)]
        for skill in QUESTIONS
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
