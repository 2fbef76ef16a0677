"""The engine of ``rerank``: each step takes pairs of similar length from all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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
from workers.engines.reranking.cross_encoder import CrossEncoder, CrossEncoderLayout, Pair
from workers.engines.reranking.options import Options, read_options
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input
from workers.protocol.engine import CancelReason, Inspected, PhaseClock, StepReport

STEP_TOKENS: Final = 4096
"""Maximum tokens in a step, including padding; a single longer pair is allowed."""


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

    def _inspect(self) -> Inspected | None:
        CrossEncoderLayout(self._spec)
        return None

    def _load(self) -> CrossEncoder:
        encoder = CrossEncoder(self._spec, self._options)
        self._choose_threads(encoder.model)
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

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        batch = self._choose()
        weights: dict[RequestId, float] = {}
        if batch:
            with torch.inference_mode(), clock.phase("forward"):
                scores = self._model.score([request.pairs[index] for request, index in batch])
            for (request, index), score in zip(batch, scores, strict=True):
                request.scores[index] = score
                length = len(request.pairs[index].ids)
                weights[request.request_id] = weights.get(request.request_id, 0.0) + length
        outcomes = [
            (request.request_id, outcome)
            for request in self._running.values()
            if (outcome := _outcome(request)) is not None
        ]
        return StepReport(weights, (), outcomes)

    def _choose(self) -> Sequence[tuple[RerankRequest, int]]:
        """Select the oldest request's next pair, and the pairs closest to it in length."""
        waiting = [
            (request, index)
            for request in self._running.values()
            if request.cancelled is None
            for index in range(len(request.pairs))
            if index not in request.scores
        ]
        if not waiting:
            return ()
        (first, index), *others = waiting
        length = len(first.pairs[index].ids)
        others.sort(key=lambda each: abs(len(each[0].pairs[each[1]].ids) - length))
        chosen, longest = [(first, index)], length
        for each in others:
            longest = max(longest, len(each[0].pairs[each[1]].ids))
            if longest * (len(chosen) + 1) > STEP_TOKENS:
                break
            chosen.append(each)
        return chosen


def _outcome(request: RerankRequest) -> Outcome | None:
    if request.cancelled is not None:
        return Cancelled(request.cancelled, usage=request.usage)
    if len(request.scores) == len(request.pairs):
        return Completed(request.usage, output=request.output())
    return None
