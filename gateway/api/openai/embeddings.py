"""OpenAI's embeddings: vectors as numbers or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

from litestar import Controller, Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from pydantic import ConfigDict

from gateway.api.http.answering import answer, to_submission
from gateway.api.http.answers import UsageView, encode_json, exact_number
from gateway.api.http.bodies import read_body
from gateway.api.http.fields import ModelName
from gateway.api.http.request import ApiRequest
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.embedding import TextEmbedding
from gateway.tasks.submission import Submission

TASK: Final = "text-embedding"
Encoding = Literal["float", "base64"]


class Embedding(TextEmbedding):
    """Body of ``POST /v1/embeddings``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "pocket-embed", "input": ["What is a hold?", "a red circle"]}]
        },
    )

    model: ModelName
    encoding_format: Encoding | None = None
    user: str | None = None


class EmbeddingView(TypedDict):
    """A vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: str | tuple[float, ...]


class EmbeddingsView(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingView]
    model: str
    usage: UsageView


class EmbeddingsController(Controller):
    path = "/v1/embeddings"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True, "direct": True}

    @post(status_code=200, operation_id="CreateEmbedding", summary="Compute embeddings of texts")
    async def create(
        self, request: ApiRequest, data: JSONBody[Embedding]
    ) -> Response[EmbeddingsView] | Stream:
        submission = await to_submission(request, model=data.model, task=TASK, input=data)
        encoding = data.encoding_format or "float"
        return await answer(request, submission, lambda closed: embedding_view(closed, encoding))


def embedding_view(closed: ClosedRequest, encoding: Encoding) -> EmbeddingsView:
    vectors = closed.output.value.get("vectors", ()) if closed.output else ()
    tokens = closed.usage.input_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode(vector, encoding)}
            for index, vector in enumerate(vectors)
        ],
        "model": closed.model,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "cost": exact_number(closed.cost_nanos),
        },
    }


def batch_submission(body: Mapping[str, Any], _: Entries) -> Submission:
    """Check one body of a batch."""
    data = read_body(Embedding, body)
    return Submission(model=data.model, task=TASK, input=data)


BATCHES: Final = BatchEndpoint(
    "/v1/embeddings",
    read=batch_submission,
    answer=lambda closed, body: encode_json(
        embedding_view(closed, body.get("encoding_format") or "float")
    ),
)


def _encode(vector: bytes, encoding: Encoding) -> str | tuple[float, ...]:
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    return struct.unpack(f"<{len(vector) // 4}f", vector)
