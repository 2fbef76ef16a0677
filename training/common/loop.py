"""Shared by the training scripts: time, learning rate, optimizer and text encoder.

A run takes a given time on one core. It saves periodically, and another run can continue from what
was saved.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from training.common.captions import SHAPE_WORDS
from workers.engines.diffusion.pocket_image import TEXT_TOKENS, encode_text

TEXT: Final = 128
"""Width of the text encoder's hidden states."""
_TEXTS: Final = 64
_KINDS: Final = ("colour", "size", "place")


class LabelledText(Protocol):
    """A text with its meaning as classes."""

    @property
    def text(self) -> str: ...

    @property
    def meaning(self) -> dict[str, str]: ...


def clock(minutes: float) -> Iterator[float]:
    """Yield the elapsed fraction of the time, until it reaches 1."""
    began = time.monotonic()
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        yield done


def adam(*groups: tuple[Any, float]) -> torch.optim.AdamW:
    """Create AdamW over groups of parameters, each with its maximum learning rate."""
    return torch.optim.AdamW(
        [{"params": list(part), "lr": rate, "initial_lr": rate} for part, rate in groups],
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )


def set_rate(optimizer: torch.optim.Optimizer, done: float) -> None:
    """Set the learning rate: short warm-up, constant for half of the time, then linear decay."""
    part = min(1.0, done / 0.01 + 0.01) * min(1.0, max(0.01, (1 - done) / 0.5))
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * part


def step(optimizer: torch.optim.Optimizer, parameters: Any, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Mean:
    """A running mean of weights, which gives better results than the latest weights."""

    def __init__(self, weights: Sequence[torch.Tensor], *, keep: float = 0.9985) -> None:
        self._weights = weights
        self._mean = [one.detach().clone() for one in weights]
        self._keep = keep
        self._turns = 0

    @torch.no_grad()
    def update(self) -> None:
        self._turns += 1
        keep = min(self._keep, self._turns / (self._turns + 20))
        for one, weight in zip(self._mean, self._weights, strict=True):
            one.lerp_(weight, 1 - keep)

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the weights and their mean."""
        for weight, other in zip(self._weights, self._mean, strict=True):
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)


def make_tokenizer(texts: Callable[[random.Random], str], known: Sequence[str] = ()) -> Any:
    """Create a word-level tokenizer: the words in ``known``, then those of the samples."""
    r = random.Random(0)
    words = pre_tokenizers.BertPreTokenizer()
    seen: set[str] = set()
    for _ in range(20_000):
        seen.update(word for word, _ in words.pre_tokenize_str(texts(r).lower()))
    first = known or ("<pad>", "</s>", "<unk>")
    vocabulary = {word: i for i, word in enumerate([*first, *sorted(seen - set(first))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = words
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_text_encoder(vocabulary: int) -> Any:
    config = T5Config(
        vocab_size=vocabulary,
        d_model=TEXT,
        d_kv=32,
        d_ff=384,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5EncoderModel(config)


@torch.no_grad()
def copy_weights(model: nn.Module, trained: nn.Module) -> float:
    """Copy the weights of another model; return the fraction of weights that were copied.

    For weights of another size, the common rows and channels are copied, from the first on.
    """
    weights = dict(model.named_parameters())
    taken = 0
    for name, old in trained.named_parameters():
        new = weights.get(name)
        if new is None or new.ndim != old.ndim:
            continue
        part = tuple(slice(min(a, b)) for a, b in zip(new.shape, old.shape, strict=True))
        new[part] = old[part].to(new.dtype)
        taken += new[part].numel()
    return taken / sum(one.numel() for one in weights.values())


class _TextHeads(nn.Module):
    """Heads that classify a text by its summary, and each thing by its noun. For training only."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.whole = nn.ModuleDict({k: nn.Linear(TEXT, len(v)) for k, v in fields.items()})
        self.noun = nn.ModuleDict({k: nn.Linear(TEXT, len(fields[f"{k}1"])) for k in _KINDS})


def train_text(
    tokenizer: Any,
    encoder: Any,
    fields: Mapping[str, Sequence[str]],
    choose: Callable[[random.Random], LabelledText],
    *,
    minutes: float,
    r: random.Random,
) -> None:
    """Train a text encoder to classify texts, before any image is used.

    The state of a thing's noun learns its colour, size and place, because the denoiser attends to
    it.
    """
    reader = _TextHeads(fields)
    optimizer = adam((encoder.parameters(), 1.5e-3), (reader.parameters(), 1.5e-3))
    nouns = {word for words in SHAPE_WORDS.values() for word in words}
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(word) for word in sorted(nouns)])
    right, asked, turns = dict.fromkeys(fields, 0), dict.fromkeys(fields, 0), 0
    for done in clock(minutes):
        set_rate(optimizer, done)
        samples = [choose(r) for _ in range(_TEXTS)]
        texts = [one.text for one in samples]
        with torch.autocast("cpu", torch.bfloat16):
            states, _, summary = encode_text(tokenizer, encoder, texts, padding="longest")
        states, summary = states.float(), summary.float()
        loss = torch.zeros(())
        for name, classes in fields.items():
            rows = [i for i, one in enumerate(samples) if name in one.meaning]
            if not rows:
                continue
            wanted = torch.tensor([classes.index(samples[i].meaning[name]) for i in rows])
            said = reader.whole[name](summary[rows])
            loss = loss + F.cross_entropy(said, wanted)
            right[name] += int((said.argmax(1) == wanted).sum())
            asked[name] += len(rows)
        tokens = tokenizer(
            texts, padding="longest", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        ).input_ids
        found = [
            (i, place, number)
            for i, one in enumerate(samples)
            if f"{_KINDS[-1]}1" in one.meaning and "colour1" in one.meaning
            for number, place in enumerate(
                torch.isin(tokens[i], ids).nonzero()[:, 0].tolist(), start=1
            )
        ]
        at = states[[i for i, _, _ in found], [place for _, place, _ in found]]
        for kind, head in reader.noun.items():
            classes = fields[f"{kind}1"]
            wanted = torch.tensor(
                [classes.index(samples[i].meaning[f"{kind}{n}"]) for i, _, n in found]
            )
            loss = loss + F.cross_entropy(head(at), wanted)
        step(optimizer, [*encoder.parameters(), *reader.parameters()], loss)
        turns += 1
        if turns % 200 == 0:
            share = {name: round(right[name] / max(1, asked[name]), 3) for name in fields}
            print(f"text {done:.2f} step {turns} right {share}", flush=True)
            right, asked = dict.fromkeys(fields, 0), dict.fromkeys(fields, 0)
