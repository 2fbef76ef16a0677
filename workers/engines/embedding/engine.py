"""The engine of ``text-embedding``: each step takes texts of similar length from all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from workers.contract.jobs import (
    Cancelled,
    Completed,
    EmbeddingInput,
    Job,
    Outcome,
    RequestId,
    Usage,
)
from workers.contract.models import ModelSpec
from workers.engines.embedding.encoder import Encoder, EncoderLayout
from workers.engines.embedding.options import Options, read_options
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input
from workers.protocol.engine import CancelReason, PhaseClock, StepReport

STEP_TOKENS: Final = 4096
"""Maximum tokens in a step, including padding; a single longer text is allowed."""


@dataclass(slots=True, eq=False)
class _EmbeddingRequest:
    """State of one request: its texts as token ids, and the vectors computed so far, by index."""

    request_id: RequestId
    texts: list[list[int]]
    dimensions: int | None
    vectors: dict[int, bytes] = field(default_factory=dict)
    cancelled: CancelReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(requests=1, input_tokens=sum(len(self.texts[index]) for index in self.vectors))

    def output(self) -> dict[str, list[bytes]]:
        return {"vectors": [self.vectors[index] for index in sorted(self.vectors)]}


class EmbeddingEngine(TorchEngine[Options, Encoder, _EmbeddingRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))

    def _inspect(self) -> None:
        EncoderLayout(self._spec, self._options)

    def _load(self) -> Encoder:
        encoder = Encoder(self._spec, self._options)
        self._choose_threads(encoder.model)
        with torch.inference_mode():
            encoder.embed([encoder.encode("Hello")])
        return encoder

    def _read(self, job: Job, files: Sequence[bytes]) -> _EmbeddingRequest:
        input = read_input(job, EmbeddingInput)
        self._check_dimensions(input.dimensions)
        encoder, texts = self._model, []
        for index, text in enumerate(input.inputs):
            try:
                ids = encoder.encode(text)
            except ValueError as error:
                message = f"Input {index} is not valid: {error}."
                raise InputError("invalid_input", message, "input") from error
            if len(ids) > encoder.context:
                raise InputError(
                    "context_length_exceeded",
                    f"Input {index} has {len(ids)} tokens; this model's context has "
                    f"{encoder.context}.",
                    "input",
                )
            texts.append(ids)
        return _EmbeddingRequest(job.request_id, texts, input.dimensions)

    def step(self, clock: PhaseClock) -> StepReport:
        encoder = self._model
        use_threads(self._threads)
        batch = self._choose()
        weights: dict[RequestId, float] = {}
        if batch:
            with torch.inference_mode(), clock.phase("forward"):
                vectors = encoder.embed([request.texts[index] for request, index in batch])
                encoder.wait()
        with clock.phase("postprocess"):
            for row, (request, index) in enumerate(batch):
                vector = encoder.shorten(vectors[row], request.dimensions)
                request.vectors[index] = vector.numpy().astype("<f4").tobytes()
                length = len(request.texts[index])
                weights[request.request_id] = weights.get(request.request_id, 0.0) + length
            outcomes = [
                (request.request_id, outcome)
                for request in self._running.values()
                if (outcome := _outcome(request)) is not None
            ]
        return StepReport(weights, (), outcomes)

    def _choose(self) -> Sequence[tuple[_EmbeddingRequest, int]]:
        """Select the oldest request's next text, and the texts closest to it in length."""
        waiting = [
            (request, index)
            for request in self._running.values()
            if request.cancelled is None
            for index in range(len(request.texts))
            if index not in request.vectors
        ]
        if not waiting:
            return ()
        (first, index), *others = waiting
        length = len(first.texts[index])
        others.sort(key=lambda pair: abs(len(pair[0].texts[pair[1]]) - length))
        chosen, longest = [(first, index)], length
        for pair in others:
            longest = max(longest, len(pair[0].texts[pair[1]]))
            if longest * (len(chosen) + 1) > STEP_TOKENS:
                break
            chosen.append(pair)
        return chosen

    def _check_dimensions(self, dimensions: int | None) -> None:
        own = self._model.dimensions
        if dimensions is None or dimensions == own:
            return
        if not self._options.matryoshka:
            message = f"This model's vectors have {own} dimensions and cannot be shortened."
            raise InputError("unsupported_parameter", message, "dimensions")
        if not 1 <= dimensions <= own:
            message = f"dimensions is {dimensions}; it must be between 1 and {own}."
            raise InputError("invalid_input", message, "dimensions")


def _outcome(request: _EmbeddingRequest) -> Outcome | None:
    if request.cancelled is not None:
        return Cancelled(request.cancelled, usage=request.usage)
    if len(request.vectors) == len(request.texts):
        return Completed(request.usage, output=request.output())
    return None
