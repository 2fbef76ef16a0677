"""Inputs of the task ``text-embedding``: their schema, checks and maximum usage. Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from pydantic import Field

from gateway.catalog.schema import CatalogEntry
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from gateway.tasks.text import Texts, read_texts
from workers.contract.jobs import EmbeddingInput, Prompt, Usage

INPUTS_MAX: Final = 2048
TOKENS_PER_INPUT: Final = 16
"""Upper bound on the tokens that a tokenizer adds to a text; entries that need more (for a long
prefix, say) set limits.template_tokens."""
BYTES_MAX: Final = 900 * 1024
"""Maximum size of all vectors of one answer, in bytes."""
BYTES_PER_NUMBER: Final = 4
DIMENSIONS: Final = 4096
"""Assumed dimensions of entries without limits.dimensions."""


class TextEmbedding(StrictModel):
    """Texts to embed; fields as in OpenAI's embeddings."""

    input: Texts
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None


def prepare_embedding(entry: CatalogEntry, value: TextEmbedding, *, prefix: str) -> Prepared:
    """Check the texts against a catalog entry's limits and bound their tokens."""
    limits = entry.limits
    inputs = read_texts(value.input)
    fit = BYTES_MAX // (BYTES_PER_NUMBER * (limits.dimensions or DIMENSIONS))
    most = max(1, min(limits.inputs or INPUTS_MAX, fit))
    if len(inputs) > most:
        raise InvalidRequest(
            "invalid_value",
            f"{prefix}input has {len(inputs)} texts, but {entry.name} takes at most {most}.",
            param=f"{prefix}input",
        )
    for place, text in enumerate(inputs):
        if not text:
            raise InvalidRequest(
                "invalid_value", f"Text {place} of {prefix}input is empty.", param=f"{prefix}input"
            )
    if value.dimensions and limits.dimensions and value.dimensions > limits.dimensions:
        raise over(
            f"{prefix}dimensions",
            value.dimensions,
            f"the vectors of {entry.name} have {limits.dimensions}",
        )
    return Prepared(
        input=msgspec.to_builtins(EmbeddingInput(inputs, value.dimensions)),
        limits=Usage(
            requests=1,
            input_tokens=sum(_tokens_max(entry, text) for text in inputs),
            gpu_us=gpu_us_max(limits),
        ),
    )


def _tokens_max(entry: CatalogEntry, text: Prompt) -> int:
    around = entry.limits.template_tokens or TOKENS_PER_INPUT
    size = around + len(text.encode()) if isinstance(text, str) else len(text)
    context = entry.limits.context_tokens
    return min(size, context) if context else size
