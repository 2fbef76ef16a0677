"""Reranking in the shape that Cohere's, Jina's and vLLM's clients send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict

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
from gateway.tasks.rerank import TASK, RerankTask
from gateway.tasks.submission import Submission


class RerankBody(RerankTask):
    """Body of ``POST /v1/rerank``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "reranker",
                    "query": "What is a hold?",
                    "documents": ["A hold is reserved credit.", "A red circle."],
                    "top_n": 1,
                }
            ]
        },
    )

    model: ModelName
    return_documents: bool | None = None
    # Accepted without effect: a label for the client's own use.
    user: str | None = None


class DocumentView(TypedDict):
    text: str


class RankedView(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[DocumentView]


class RerankView(TypedDict):
    """Documents by their scores, the best first; ``index`` is the place among those sent."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedView]
    usage: UsageView


class RerankController(Controller):
    path = "/v1/rerank"
    tags = ["OpenAI"]
    opt = {"scope": "inference", "holds": True}

    @post(
        status_code=200,
        operation_id="CreateRerank",
        summary="Order documents by how well they answer a query",
        description="The shape of Cohere's, Jina's and vLLM's `rerank`.",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[RerankBody]
    ) -> Response[RerankView] | Stream:
        submission = await to_submission(request, model=data.model, task=TASK, input=data)
        texts = data.documents if data.return_documents else ()
        return await answer(
            request, submission, lambda closed: rerank_view(closed, data.top_n, texts)
        )


def rerank_view(closed: ClosedRequest, top_n: int | None, texts: Sequence[str]) -> RerankView:
    scores = closed.output.value.get("scores", ()) if closed.output else ()
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[RankedView] = []
    for index in order[:top_n]:
        one: RankedView = {"index": index, "relevance_score": scores[index]}
        if texts:
            one["document"] = {"text": texts[index]}
        results.append(one)
    tokens = closed.usage.input_tokens
    return {
        "id": closed.request_id,
        "object": "list",
        "model": closed.model,
        "results": results,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "cost": exact_number(closed.cost_nanos),
        },
    }


def batch_submission(body: Mapping[str, Any], _: Entries) -> Submission:
    """Check one body of a batch."""
    data = read_body(RerankBody, body)
    return Submission(model=data.model, task=TASK, input=data)


def _batch_answer(closed: ClosedRequest, body: Mapping[str, Any]) -> bytes:
    data = read_body(RerankBody, body)
    texts = data.documents if data.return_documents else ()
    return encode_json(rerank_view(closed, data.top_n, texts))


BATCHES: Final = BatchEndpoint("/v1/rerank", read=batch_submission, answer=_batch_answer)
