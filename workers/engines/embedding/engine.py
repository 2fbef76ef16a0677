"""The engine of ``text-embedding``: a batch has texts of similar length from all requests.

It has as many tokens as fit into a short step. A long text is interrupted between the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from workers.engines.interrupting import add_hooks
from workers.engines.threads import use_threads
from workers.engines.token_batches import TokenBatches
from workers.engines.torch_engine import InputError, TorchEngine, read_input
from workers.protocol.engine import CancelReason, PhaseClock, StepReport


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
        self._batches = TokenBatches[_EmbeddingRequest, torch.Tensor](
            lambda request, index: len(request.texts[index]),
            lambda batch: self._model.embed([request.texts[index] for request, index in batch]),
        )

    def _inspect(self) -> None:
        EncoderLayout(self._spec, self._options)

    def _load(self) -> Encoder:
        encoder = Encoder(self._spec, self._options)
        self._choose_threads(encoder.model)
        add_hooks(encoder.model)
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

    def release(self, request_id: RequestId) -> None:
        super().release(request_id)
        self._batches.abandon_without(self._active)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            batch, vectors = self._batches.run_slice(self._waiting)
        with clock.phase("postprocess"):
            for row, (request, index) in enumerate(batch):
                if vectors is not None:
                    vector = self._model.shorten(vectors[row], request.dimensions)
                    request.vectors[index] = vector.numpy().astype("<f4").tobytes()
                length = len(request.texts[index])
                weights[request.request_id] = weights.get(request.request_id, 0.0) + length
            outcomes = [
                (request.request_id, outcome)
                for request in self._running.values()
                if (outcome := _outcome(request)) is not None
            ]
        return StepReport(weights, (), outcomes)

    @property
    def _active(self) -> list[_EmbeddingRequest]:
        return [one for one in self._running.values() if one.cancelled is None]

    def _waiting(self) -> Sequence[tuple[_EmbeddingRequest, int]]:
        return [
            (request, index)
            for request in self._active
            for index in range(len(request.texts))
            if index not in request.vectors
        ]

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
