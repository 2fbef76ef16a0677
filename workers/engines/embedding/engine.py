"""The engine of ``text-embedding``: each step takes texts of similar length from all requests."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch

from workers.contract.jobs import (
    Cancelled,
    Completed,
    EmbeddingInput,
    Failed,
    Job,
    Outcome,
    RequestId,
    Usage,
)
from workers.contract.models import ModelSpec
from workers.engines.embedding.encoder import Encoder
from workers.engines.embedding.options import read_options
from workers.engines.threads import threads_for, use_threads
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    Estimate,
    PhaseClock,
    StepReport,
    Wait,
)

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


class EmbeddingEngine:
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._encoder: Encoder | None = None
        self._threads = 1
        self._running: dict[RequestId, _Embedding] = {}

    def load(self) -> None:
        """Read the weights and warm up. Raise ``ValueError`` with the reason."""
        encoder = Encoder(self._spec, self._options)
        self._threads = threads_for(encoder.model, self._options.threads)
        use_threads(self._threads)
        with torch.inference_mode():
            encoder.embed([encoder.encode("Hello")])
        self._encoder = encoder

    def unload(self) -> None:
        self._encoder = None
        gc.collect()
        torch.cuda.empty_cache()

    def estimate(self, job: Job) -> Estimate:
        inputs = msgspec.convert(job.input, EmbeddingInput).inputs
        tokens = sum(
            len(text.encode()) / _BYTES_PER_TOKEN if isinstance(text, str) else len(text)
            for text in inputs
        )
        return Estimate(round(tokens * _TOKEN_US), round(min(tokens, STEP_TOKENS)) * _TOKEN_BYTES)

    def admit(self, job: Job, clock: PhaseClock, files: Sequence[bytes] = ()) -> Admission:
        assert self._encoder is not None
        if len(self._running) >= self._options.slots:
            return Wait()
        with clock.phase("preprocess"):
            try:
                asked = msgspec.convert(job.input, EmbeddingInput)
            except msgspec.ValidationError as error:
                return Failed("invalid_input", f"The input is no list of texts: {error}.")
            if failure := self._refuse_dimensions(asked.dimensions):
                return failure
            texts = []
            for place, text in enumerate(asked.inputs):
                try:
                    ids = self._encoder.encode(text)
                except ValueError as error:
                    return Failed(
                        "invalid_input", f"Input {place} cannot be read: {error}.", param="input"
                    )
                if len(ids) > self._encoder.context:
                    return Failed(
                        "context_length_exceeded",
                        f"Input {place} is {len(ids)} tokens long, and this model's context is "
                        f"{self._encoder.context}.",
                        param="input",
                    )
                texts.append(ids)
            self._running[job.request_id] = _Embedding(job.request_id, texts, asked.dimensions)
            return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        assert self._encoder is not None
        use_threads(self._threads)
        batch = self._choose()
        weights: dict[RequestId, float] = {}
        if batch:
            with torch.inference_mode(), clock.phase("forward"):
                vectors = self._encoder.embed([one.texts[place] for one, place in batch])
                self._encoder.wait()
        with clock.phase("postprocess"):
            for row, (one, place) in enumerate(batch):
                vector = self._encoder.shorten(vectors[row], one.dimensions)
                one.vectors[place] = vector.numpy().astype("<f4").tobytes()
                length = len(one.texts[place])
                weights[one.request_id] = weights.get(one.request_id, 0.0) + length
            outcomes = [
                (one.request_id, outcome)
                for one in self._running.values()
                if (outcome := _ended(one)) is not None
            ]
        return StepReport(weights, (), outcomes)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._running[request_id].cancelled = reason

    def release(self, request_id: RequestId) -> None:
        del self._running[request_id]

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

    def _refuse_dimensions(self, dimensions: int | None) -> Failed | None:
        assert self._encoder is not None
        most = self._encoder.dimensions
        if dimensions is None or dimensions == most:
            return None
        if not self._options.matryoshka:
            return Failed(
                "unsupported_parameter",
                f"This model's vectors have {most} dimensions and cannot be shortened.",
                param="dimensions",
            )
        if not 1 <= dimensions <= most:
            return Failed(
                "invalid_input",
                f"dimensions is {dimensions}; this model's vectors have {most}.",
                param="dimensions",
            )
        return None


def _ended(one: _Embedding) -> Outcome | None:
    if one.cancelled is not None:
        return Cancelled(one.cancelled, usage=one.usage)
    if len(one.vectors) == len(one.texts):
        return Completed(one.usage, output=one.output())
    return None
