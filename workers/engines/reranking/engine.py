"""The engine of ``rerank``: a batch has pairs of similar length from all requests.

It has as many tokens as fit into a short step. A long pair is interrupted between the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.contract.jobs import (
    Cancelled,
    Completed,
    Job,
    Outcome,
    RequestId,
    Usage,
)
from workers.contract.media import RerankInput
from workers.contract.models import ModelSpec
from workers.engines.interrupting import add_hooks
from workers.engines.reranking.cross_encoder import CrossEncoder, CrossEncoderLayout, Pair
from workers.engines.reranking.options import Options, read_options
from workers.engines.threads import use_threads
from workers.engines.token_batches import TokenBatches
from workers.engines.torch_engine import InputError, TorchEngine, read_input
from workers.protocol.engine import CancelReason, Inspected, PhaseClock, StepReport


@dataclass(slots=True, eq=False)
class RerankRequest:
    """State of one request: its pairs, and the scores computed so far, by document."""

    request_id: RequestId
    pairs: list[Pair]
    scores: dict[int, float] = field(default_factory=dict)
    cancelled: CancelReason | None = None

    @property
    def usage(self) -> Usage:
        read = sum(len(self.pairs[index].ids) for index in self.scores)
        return Usage(requests=1, input_tokens=read)

    def output(self) -> dict[str, Any]:
        return {"scores": [self.scores[index] for index in range(len(self.pairs))]}


class RerankEngine(TorchEngine[Options, CrossEncoder, RerankRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._batches = TokenBatches[RerankRequest, list[float]](
            lambda request, index: len(request.pairs[index].ids),
            lambda batch: self._model.score([request.pairs[index] for request, index in batch]),
        )

    def _inspect(self) -> Inspected | None:
        CrossEncoderLayout(self._spec)
        return None

    def _load(self) -> CrossEncoder:
        encoder = CrossEncoder(self._spec, self._options)
        self._choose_threads(encoder.model)
        add_hooks(encoder.model)
        with torch.inference_mode():
            encoder.score([encoder.encode("Hello", "world")])
        return encoder

    def _read(self, job: Job, files: Sequence[bytes]) -> RerankRequest:
        input = read_input(job, RerankInput)
        try:
            pairs = [self._model.encode(input.query, each) for each in input.documents]
        except ValueError as error:
            message = f"The query is too long: {error}."
            raise InputError("context_length_exceeded", message, "query") from error
        return RerankRequest(job.request_id, pairs)

    def release(self, request_id: RequestId) -> None:
        super().release(request_id)
        self._batches.abandon_without(self._active)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            batch, scores = self._batches.run_slice(self._waiting)
        for row, (request, index) in enumerate(batch):
            if scores is not None:
                request.scores[index] = scores[row]
            length = len(request.pairs[index].ids)
            weights[request.request_id] = weights.get(request.request_id, 0.0) + length
        outcomes = [
            (request.request_id, outcome)
            for request in self._running.values()
            if (outcome := _outcome(request)) is not None
        ]
        return StepReport(weights, (), outcomes)

    @property
    def _active(self) -> list[RerankRequest]:
        return [one for one in self._running.values() if one.cancelled is None]

    def _waiting(self) -> Sequence[tuple[RerankRequest, int]]:
        return [
            (request, index)
            for request in self._active
            for index in range(len(request.pairs))
            if index not in request.scores
        ]


def _outcome(request: RerankRequest) -> Outcome | None:
    if request.cancelled is not None:
        return Cancelled(request.cancelled, usage=request.usage)
    if len(request.scores) == len(request.pairs):
        return Completed(request.usage, output=request.output())
    return None
