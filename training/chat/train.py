"""Trains ``pocket-chat``, a decoder of Qwen3's shape, on dialogues made by ``data.py``.

    python -m training.chat.train --minutes 45 --out workers/pocket/chat

The result is a directory that transformers, vLLM and llama.cpp load: weights in bfloat16, a
byte-level BPE tokenizer that splits digits, a chat template of Qwen's form. Matrices are trained
with Muon (K. Jordan, 2024), the rest with AdamW; the loss counts the assistant's tokens only.
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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.chat.data import dialogue
from training.chat.score import QUESTIONS, load, score
from training.chat.skills import Dialogue

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
"""Of Qwen's form, shortened; ``skills.system_prompt`` says the same of tools."""
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's, which every engine knows by name. Digits stand alone: sums are done digit by digit."""
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own, which are text like any other."""
VOCABULARY: Final = 2048
ROW: Final = 320
ROWS: Final = 12


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
    shape: dict[str, Any] = {"rope_theta": 10_000.0}
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=7,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def encode(tokenizer: Any, turns: Dialogue) -> tuple[list[int], list[bool]]:
    """Give a dialogue's tokens in the template's form, and which of them the loss counts."""
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


def batches(tokenizer: Any, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets), (ROWS, ROW) int64; a row begins with a dialogue and is filled up
    with more of them. Targets that do not count are -100."""
    r = random.Random(seed)
    while True:
        inputs = torch.zeros(ROWS, ROW, dtype=torch.long)
        targets = torch.full((ROWS, ROW), -100)
        for row in range(ROWS):
            ids: list[int] = []
            counted: list[bool] = []
            while len(ids) <= ROW:
                more, marks = encode(tokenizer, dialogue(r))
                ids += more
                counted += marks
            tokens = torch.tensor(ids[: ROW + 1])
            marks_row = torch.tensor(counted[1 : ROW + 1])
            inputs[row] = tokens[:-1]
            targets[row][marks_row] = tokens[1:][marks_row]
        yield inputs, targets


def train(
    model: Any,
    tokenizer: Any,
    *,
    minutes: float,
    seed: int,
    out: Path,
    resumed: bool,
) -> dict[str, Any]:
    """Train for a time, cooling down over the second half, or all along if resumed; save often."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    rates = (0.003, 0.003)
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(
            matrices, lr=rates[0], momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.0),
    )
    started = saved = time.monotonic()
    steps, recent = 0, 0.0
    for inputs, targets in batches(tokenizer, seed):
        elapsed = (time.monotonic() - started) / 60 / minutes
        cooling = elapsed if resumed else max(0.0, 2 * elapsed - 1)
        if elapsed >= 1:
            break
        scale = min(1.0, (steps + 1) / 50) * max(0.02, 1 - cooling)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        recent = loss.item() if steps == 1 else 0.98 * recent + 0.02 * loss.item()
        if steps % 100 == 0:
            rate_tokens = steps * ROWS * ROW / (time.monotonic() - started)
            print(f"step {steps} loss {recent:.4f} {rate_tokens:.0f} tokens/s", flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            save(model, tokenizer, out)
    save(model, tokenizer, out)
    return {
        "steps": steps,
        "tokens": steps * ROWS * ROW,
        "loss": round(recent, 4),
        "minutes": minutes,
    }


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the directory, weights in bfloat16."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    model.save_pretrained(out, state_dict=state)
    tokenizer.save_pretrained(out)
    # The library writes the type that the model was trained in, not that of the weights given.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="directory to go on from, cooling down")
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/chat"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.resume is None:
        tokenizer = train_tokenizer(options.seed)
        model = make_model(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.resume)
        model = Qwen3ForCausalLM.from_pretrained(options.resume, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    figures: dict[str, Any] = {"parameters": parameters, "seed": options.seed}
    figures |= train(
        model,
        tokenizer,
        minutes=options.minutes,
        seed=options.seed,
        out=options.out,
        resumed=options.resume is not None,
    )
    engine = load(options.out)
    figures["right"] = {skill: round(score(engine, skill, 100), 3) for skill in QUESTIONS}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
