"""Reads and checks the options and limits of a catalog entry for this engine.

Unsupported values raise ``ValueError`` with a message for the operator; none is silently adjusted.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import DTYPES, TorchOptions, read

DRAFT_TOKENS_MAX: Final = 16


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: draft tokens, several of which the model verifies in one step."""

    method: Literal["lookup", "draft"] = "lookup"
    """``lookup`` finds repetitions in prompt and answer; ``draft`` runs a smaller model."""
    tokens: int = 4
    """Maximum number of draft tokens per step."""
    checkpoint: str | None = None
    """Checkpoint of the draft model: a directory or, in a catalog, the name of another entry."""


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the catalog entry, beside those of every torch engine (``TorchOptions``)."""

    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)

    cache_tokens: int | None = None
    """Capacity of the KV cache in tokens, for all sequences together. Default: enough for ``slots``
    sequences of full context, or what fits."""
    prefix_cache: bool = True
    """Whether KV blocks of a prompt are reused for prompts of the same account with the same
    prefix."""
    cache_answers: bool | None = None
    """Whether blocks of answers are reused too, by the next turn of a chat. A written block differs
    from one that was read in its last bits. Default: unless answers must be bit-identical
    (``batch_invariant``)."""
    batch_invariant: bool = True
    """Whether answers are identical, to the last bit, whatever else is running. Slightly slower on
    devices whose matrix products depend on the number of rows."""
    speculation: Speculation | None = None
    picture_pixels_max: int | None = None
    """Size in pixels to which larger pictures are scaled down. Default: the checkpoint's own, or
    what ``limits.source_tokens`` allows."""
    picture_pixels_min: int | None = None
    """Size in pixels to which smaller pictures are scaled up. Default: the checkpoint's own, at
    most a quarter of the maximum."""

    @property
    def caches_answers(self) -> bool:
        own = not self.batch_invariant if self.cache_answers is None else self.cache_answers
        return self.prefix_cache and own

    @property
    def decode_tokens_max(self) -> int:
        """Maximum tokens of one sequence in a step: the next one and its draft tokens."""
        return 1 if self.speculation is None else 1 + self.speculation.tokens


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    counts = ("cache_tokens", "picture_pixels_max", "picture_pixels_min")
    options = read(spec, Options, counts=counts)
    if (speculation := options.speculation) is not None:
        if not 1 <= speculation.tokens <= DRAFT_TOKENS_MAX:
            raise ValueError(
                f"speculation.tokens is {speculation.tokens}; it must be 1 to {DRAFT_TOKENS_MAX}"
            )
        if (speculation.method == "draft") != (speculation.checkpoint is not None):
            raise ValueError(
                "speculation.checkpoint is required for the method draft, and only allowed with it"
            )
    pixels = (options.picture_pixels_min, options.picture_pixels_max)
    if pixels != (None, None) and not reads_pictures(spec):
        raise ValueError(
            "picture_pixels_min and picture_pixels_max are only for models that read pictures: "
            "state input: [text, image] and limits.source_tokens"
        )
    return options


def reads_pictures(spec: ModelSpec) -> bool:
    """Whether conversations of a catalog entry can have pictures."""
    return spec.limits.get("source_tokens") is not None


def read_context(spec: ModelSpec) -> int | None:
    """Return ``limits.context_tokens``. Raise ``ValueError`` if it is not a valid number."""
    context = spec.limits.get("context_tokens")
    if context is None:
        return None
    if not isinstance(context, int) or context < 2:
        raise ValueError(
            f"limits.context_tokens is {context!r}; it must be an integer of at least 2"
        )
    return context
