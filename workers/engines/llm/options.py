"""The options and limits of a catalog entry that this engine understands, checked.

Whatever cannot be met is refused with a sentence for the operator; nothing is silently rounded.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read

GUESSES_MAX: Final = 16


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Guessing tokens ahead, which the model then checks several at a time."""

    method: Literal["lookup", "draft"] = "lookup"
    """``lookup`` finds repetitions in prompt and answer; ``draft`` asks a smaller model."""
    tokens: int = 4
    """Guessed at most, in each step."""
    checkpoint: str | None = None
    """Of the draft model: a directory, or in a catalog the name of another entry."""


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    cache_tokens: int | None = None
    """Tokens that the cache has room for, of all sequences together; by default as many times the
    context as there are slots, or what fits."""
    prefix_cache: bool = True
    """Whether the beginning of a prompt is kept for others of the same account that begin so."""
    batch_invariant: bool = True
    """Whether an answer is the same to the last bit whoever else is running, which takes a little
    longer on devices where it does not come by itself."""
    speculation: Speculation | None = None

    @property
    def width(self) -> int:
        """Tokens of one sequence in a step: the next, and those guessed."""
        return 1 if self.speculation is None else 1 + self.speculation.tokens


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    options = read(spec, Options, counts=("cache_tokens",))
    if (speculation := options.speculation) is not None:
        if not 1 <= speculation.tokens <= GUESSES_MAX:
            raise ValueError(
                f"speculation.tokens is {speculation.tokens}; 1 to {GUESSES_MAX} are accepted"
            )
        if (speculation.method == "draft") != (speculation.checkpoint is not None):
            raise ValueError("speculation.checkpoint names the draft model of the method draft")
    return options


def read_context(spec: ModelSpec) -> int | None:
    """Read ``limits.context_tokens``. Raise ``ValueError`` if it is no number of tokens."""
    asked = spec.limits.get("context_tokens")
    if asked is None:
        return None
    if not isinstance(asked, int) or asked < 2:
        raise ValueError(f"limits.context_tokens is {asked!r}; an integer from 2 on is needed")
    return asked
