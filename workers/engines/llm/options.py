"""The options and limits of a catalog entry that this engine understands, checked.

Whatever cannot be met is refused with a sentence for the operator; nothing is silently rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.registry import Serving

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Of the weights of the large matrices; everything else, and the cache, is in bfloat16.
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
}
DEVICES: Final = ("auto", "cpu", "cuda")
GUESSES_MAX: Final = 16


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Guessing tokens ahead, which the model then checks several at a time."""

    method: Literal["lookup", "draft"] = "lookup"
    """``lookup`` finds repetitions in prompt and answer; ``draft`` asks a smaller model."""
    tokens: int = 4
    """Guessed at most, in each step."""
    checkpoint: str | None = None
    """Of the draft model: a directory, or in a catalog the name of another entry."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``registry.Serving``."""

    dtype: str = "float32"
    device: str = "auto"
    """``auto`` is CUDA where there is a device, otherwise the CPU."""
    slots: int = 8
    """Sequences at a time."""
    cache_tokens: int | None = None
    """Tokens that the cache has room for, of all sequences together; by default as many times the
    context as there are slots, or what fits."""
    prefix_cache: bool = True
    """Whether the beginning of a prompt is kept for others of the same account that begin so."""
    batch_invariant: bool = True
    """Whether an answer is the same to the last bit whoever else is running, which takes a little
    longer on devices where it does not come by itself."""
    speculation: Speculation | None = None
    threads: int | None = None
    """Of torch, in this model's steps; without it one for a small model, otherwise torch's own
    choice, or ``OMP_NUM_THREADS``."""

    @property
    def width(self) -> int:
        """Tokens of one sequence in a step: the next, and those guessed."""
        return 1 if self.speculation is None else 1 + self.speculation.tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    others = set(Serving.__struct_fields__) - set(Options.__struct_fields__)
    own = {name: value for name, value in spec.options.items() if name not in others}
    try:
        options = msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        accepted = ", ".join((*Options.__struct_fields__, *sorted(others)))
        raise ValueError(f"{error}; options of the engine llm are {accepted}") from error
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype is {options.dtype!r}; one of {', '.join(DTYPES)} is accepted")
    if options.device not in DEVICES:
        raise ValueError(f"device is {options.device!r}; one of {', '.join(DEVICES)} is accepted")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here")
    if options.torch_dtype is torch.float16 and options.torch_device.type == "cpu":
        # Measured: 0.4 to 3 GFLOP/s, where the same core does 200 in bfloat16 and 90 in float32.
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    if options.cache_tokens is not None and options.cache_tokens < 1:
        raise ValueError(f"cache_tokens is {options.cache_tokens}; at least 1 is needed")
    if (speculation := options.speculation) is not None:
        if not 1 <= speculation.tokens <= GUESSES_MAX:
            raise ValueError(
                f"speculation.tokens is {speculation.tokens}; 1 to {GUESSES_MAX} are accepted"
            )
        if (speculation.method == "draft") != (speculation.checkpoint is not None):
            raise ValueError("speculation.checkpoint names the draft model of the method draft")
    if options.slots < 1:
        raise ValueError(f"slots is {options.slots}; at least 1 is needed")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"threads is {options.threads}; at least 1 is needed")
    return options


def read_context(spec: ModelSpec) -> int | None:
    """Read ``limits.context_tokens``. Raise ``ValueError`` if it is no number of tokens."""
    asked = spec.limits.get("context_tokens")
    if asked is None:
        return None
    if not isinstance(asked, int) or asked < 2:
        raise ValueError(f"limits.context_tokens is {asked!r}; an integer from 2 on is needed")
    return asked
