"""Inputs of the task ``rerank``: their schema, checks and maximum usage. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field, StringConstraints

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.tasks.embedding import TOKENS_PER_INPUT
from gateway.tasks.prepared import Prepared, gpu_us_max
from workers.contract.jobs import Usage
from workers.contract.media import RerankInput

TASK: Final[Task] = "rerank"
DOCUMENTS_MAX: Final = 1000
TEXT_MAX: Final = 200_000


def _text(value: Any) -> Any:
    """Accept ``{"text": …}`` for a text, as Cohere's and Jina's clients may send it."""
    return (
        value["text"] if isinstance(value, dict) and isinstance(value.get("text"), str) else value
    )


Document: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=TEXT_MAX), BeforeValidator(_text)
]


class RerankTask(StrictModel):
    """A query, and the documents to order by how well they answer it."""

    query: Annotated[str, StringConstraints(min_length=1, max_length=TEXT_MAX)]
    documents: Annotated[list[Document], Field(min_length=1, max_length=DOCUMENTS_MAX)]
    top_n: Annotated[int, Field(ge=1, le=DOCUMENTS_MAX)] | None = None
    """Number of results. Default: all documents."""


def prepare_rerank(entry: CatalogEntry, value: RerankTask, *, prefix: str) -> Prepared:
    """Check the texts against a catalog entry's limits and bound their tokens."""
    limits = entry.limits
    most = limits.inputs or DOCUMENTS_MAX
    if len(value.documents) > most:
        raise InvalidRequest(
            "invalid_value",
            f"{prefix}documents has {len(value.documents)} texts, but {entry.name} takes at most "
            f"{most}.",
            param=f"{prefix}documents",
        )
    around = (limits.template_tokens or TOKENS_PER_INPUT) + len(value.query.encode())
    sizes = [around + len(document.encode()) for document in value.documents]
    context = limits.context_tokens
    return Prepared(
        input=msgspec.to_builtins(RerankInput(value.query, tuple(value.documents))),
        limits=Usage(
            requests=1,
            input_tokens=sum(min(size, context) if context else size for size in sizes),
            gpu_us=gpu_us_max(limits),
        ),
    )
