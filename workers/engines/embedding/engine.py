"""The engine of ``text-embedding``: each step takes texts of similar length from all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
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
from workers.engines.embedding.encoder import Encoder
from workers.engines.embedding.options import Options, read_options
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input
from workers.protocol.engine import CancelReason, Estimate, PhaseClock, StepReport

STEP_TOKENS: Final = 4096
"""At most so many tokens in a step, padding included, unless one text alone has more."""
_TOKEN_US: Final = 20.0
_TOKEN_BYTES: Final = 64 * 1024
_BYTES_PER_TOKEN: Final = 3


@dataclass(slots=True, eq=False)
class _Embedding:
    """One request: its texts, and the vectors of those that are done."""

    request_id: RequestId
    texts: list[list[int]]
    dimensions: int | None
    vectors: dict[int, bytes] = field(default_factory=dict)
    cancelled: CancelReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(requests=1, input_tokens=sum(len(self.texts[place]) for place in self.vectors))

    def output(self) -> dict[str, list[bytes]]:
        return {"vectors": [self.vectors[place] for place in sorted(self.vectors)]}


class EmbeddingEngine(TorchEngine[Options, Encoder, _Embedding]):
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))

    def _load(self) -> Encoder:
        encoder = Encoder(self._spec, self._options)
        self._choose_threads(encoder.model)
        with torch.inference_mode():
            encoder.embed([encoder.encode("Hello")])
        return encoder

    def estimate(self, job: Job) -> Estimate:
        inputs = msgspec.convert(job.input, EmbeddingInput).inputs
        tokens = sum(
            len(text.encode()) / _BYTES_PER_TOKEN if isinstance(text, str) else len(text)
            for text in inputs
        )
        return Estimate(round(tokens * _TOKEN_US), round(min(tokens, STEP_TOKENS)) * _TOKEN_BYTES)

    def _read(self, job: Job, files: Sequence[bytes]) -> _Embedding:
        asked = read_input(job, EmbeddingInput)
        self._check_dimensions(asked.dimensions)
        encoder, texts = self._model, []
        for place, text in enumerate(asked.inputs):
            try:
                ids = encoder.encode(text)
            except ValueError as error:
                message = f"Input {place} cannot be read: {error}."
                raise InputError("invalid_input", message, "input") from error
            if len(ids) > encoder.context:
                raise InputError(
                    "context_length_exceeded",
                    f"Input {place} is {len(ids)} tokens long, and this model's context is "
                    f"{encoder.context}.",
                    "input",
                )
            texts.append(ids)
        return _Embedding(job.request_id, texts, asked.dimensions)

    def step(self, clock: PhaseClock) -> StepReport:
        encoder = self._model
        use_threads(self._threads)
        batch = self._choose()
        weights: dict[RequestId, float] = {}
        if batch:
            with torch.inference_mode(), clock.phase("forward"):
                vectors = encoder.embed([one.texts[place] for one, place in batch])
                encoder.wait()
        with clock.phase("postprocess"):
            for row, (one, place) in enumerate(batch):
                vector = encoder.shorten(vectors[row], one.dimensions)
                one.vectors[place] = vector.numpy().astype("<f4").tobytes()
                length = len(one.texts[place])
                weights[one.request_id] = weights.get(one.request_id, 0.0) + length
            outcomes = [
                (one.request_id, outcome)
                for one in self._running.values()
                if (outcome := _ended(one)) is not None
            ]
        return StepReport(weights, (), outcomes)

    def _choose(self) -> Sequence[tuple[_Embedding, int]]:
        """The oldest request's next text, and those of all that are nearest to it in length."""
        waiting = [
            (one, place)
            for one in self._running.values()
            if one.cancelled is None
            for place in range(len(one.texts))
            if place not in one.vectors
        ]
        if not waiting:
            return ()
        (first, place), *others = waiting
        size = len(first.texts[place])
        others.sort(key=lambda pair: abs(len(pair[0].texts[pair[1]]) - size))
        chosen, longest = [(first, place)], size
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
            message = f"dimensions is {dimensions}; this model's vectors have {own}."
            raise InputError("invalid_input", message, "dimensions")


def _ended(one: _Embedding) -> Outcome | None:
    if one.cancelled is not None:
        return Cancelled(one.cancelled, usage=one.usage)
    if len(one.vectors) == len(one.texts):
        return Completed(one.usage, output=one.output())
    return None
