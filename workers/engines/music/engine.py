"""The engine of music that is generated as notes: each step adds a token to every piece.

The model runs on the decoder of language models, which is batch-invariant, and each piece has its
own random state: the same seed gives the same piece under any load. A bar is rendered as soon as it
is complete, on another thread, so a piece can be streamed while it is generated. Cancellation takes
effect between two tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.contract.jobs import Cancelled, Failed, Job, Outcome, RequestId
from workers.contract.media import RATE_MAX, RATE_MIN, MusicInput, characters
from workers.contract.models import ModelSpec
from workers.engines.audio_output import AudioOutput
from workers.engines.checkpoints import read_tokenizer
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Weights, directory, read_shape
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.loading import make_decoder
from workers.engines.memory import is_out_of_memory
from workers.engines.music.instruments import Bank
from workers.engines.music.notes import MARKS, MOODS, TEMPOS, TOKENS
from workers.engines.music.options import Options, decoding, read_options
from workers.engines.music.prompt import parse_key, parse_mood, parse_prompt
from workers.engines.music.request import RATE, MusicRequest
from workers.engines.music.writer import PieceSpec, PieceWriter
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, out_of_memory, read_input
from workers.media.encode import Origin
from workers.protocol.engine import Deferred, Inspected, PhaseClock, StepReport

log = logging.getLogger(__name__)

TASK: Final = "text-to-music"


@dataclass(frozen=True, slots=True)
class _Loaded:
    decoder: Decoder
    vocabulary: Mapping[str, int]
    context: int
    tables: tuple[tuple[int, ...], ...]
    """The KV cache blocks of each slot."""


class MusicEngine(TorchEngine[Options, _Loaded, MusicRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._bank = Bank(RATE)

    def _inspect(self) -> Inspected:
        self._read_vocabulary()
        _, shape = read_shape(self._spec, decoding(self._options))
        return Inspected(cache_bytes=shape.bytes)

    def _read_vocabulary(self) -> dict[str, int]:
        for task in (self._spec.task, *self._spec.also):
            if task != TASK:
                raise ValueError(f"the engine music supports {TASK}, not {task}")
        vocabulary: dict[str, int] = read_tokenizer(directory(self._spec)).get_vocab()
        if missing := next((t for t in (*MARKS, *TOKENS) if t not in vocabulary), None):
            raise ValueError(f"not a music checkpoint: its tokenizer lacks {missing}")
        return vocabulary

    def _load(self) -> _Loaded:
        vocabulary = self._read_vocabulary()
        options = decoding(self._options)
        weights = Weights(self._spec, options)
        self._choose_threads(weights.model)
        blocks_per_slot = -(-weights.context // weights.shape.block_tokens)
        first = [1 + slot * blocks_per_slot for slot in range(self._options.slots)]
        tables = tuple(tuple(range(begin, begin + blocks_per_slot)) for begin in first)
        decoder = make_decoder(weights, options)
        return _Loaded(decoder, vocabulary, weights.context, tables)

    def unload(self) -> None:
        self._bank = Bank(RATE)
        super().unload()

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        active = [
            request
            for request in self._running.values()
            if request.cancelled is None and request.failure is None and not request.writer.ended
        ]
        inputs = [self._next_input(request) for request in active]
        events: list[tuple[RequestId, Deferred]] = []
        weights: dict[RequestId, float] = {}
        with torch.inference_mode():
            logits = self._compute(inputs, clock)
            with clock.phase("postprocess"):
                for request, sequence, row in zip(active, inputs, logits, strict=True):
                    name = request.job.request_id
                    events += [(name, event) for event in _advance(request, row)]
                    weights[name] = float(len(sequence.ids))
        with clock.phase("postprocess"):
            outcomes = [
                (name, outcome)
                for name, request in self._running.items()
                if (outcome := _outcome(request)) is not None
            ]
        return StepReport(weights or dict.fromkeys(dict(outcomes), 1.0), events, outcomes)

    # --- One step ---------------------------------------------------------------------------------

    def _next_input(self, request: MusicRequest) -> SequenceInput:
        start, ids = request.writer.next_input()
        return SequenceInput(ids, start, self._model.tables[request.slot])

    def _compute(self, inputs: Sequence[SequenceInput], clock: PhaseClock) -> list[torch.Tensor]:
        """Compute the logits ``(vocabulary,)`` after each input, on the CPU."""
        decoder = self._model.decoder
        decodes = [row for row, sequence in enumerate(inputs) if len(sequence.ids) == 1]
        prefills = [row for row, sequence in enumerate(inputs) if len(sequence.ids) > 1]
        with clock.phase("transfer"):
            staged = decoder.stage(
                [inputs[row] for row in decodes], [inputs[row] for row in prefills]
            )
            decoder.wait()
        with clock.phase("forward"):
            logits = decoder.run(staged).cpu()
        return [logits[row] for row in _inverse([*decodes, *prefills])]

    # --- Input ------------------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> MusicRequest:
        if job.task != TASK:
            raise InputError("invalid_input", f"{self._spec.name} does not support {job.task}.")
        input = read_input(job, MusicInput)
        spec = self._piece_spec(input, job.limits.audio_ms)
        try:
            writer = PieceWriter(spec, self._model.vocabulary, context=self._model.context)
        except ValueError as error:
            raise InputError("invalid_input", f"{error}.", "duration_ms") from error
        origin = Origin(self._spec.name, str(job.request_id), input.seed)
        output = AudioOutput(input, origin, rate=RATE, stream=job.stream, channels=2)
        samples = round(spec.seconds * RATE)
        output.characters = characters(input.prompt)
        used = {request.slot for request in self._running.values()}
        slot = next(slot for slot in range(self._options.slots) if slot not in used)
        return MusicRequest(job, input, writer, samples, output, self._bank, slot)

    def _start(self, request_id: RequestId, request: MusicRequest, clock: PhaseClock) -> None:
        with clock.phase("transfer"):
            self._model.decoder.zero_blocks(self._model.tables[request.slot])
        super()._start(request_id, request, clock)

    def _piece_spec(self, input: MusicInput, audio_ms_max: int) -> PieceSpec:
        """Raise ``InputError`` for a parameter that the model would otherwise ignore."""
        name, rate = self._spec.name, input.sample_rate
        if input.lyrics:
            raise InputError("unsupported_parameter", f"{name} does not support lyrics.", "lyrics")
        if input.parameters:
            field = min(input.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)
        if rate is not None and not RATE_MIN <= rate <= RATE_MAX:
            message = f"sample_rate is {rate}; accepted are {RATE_MIN} to {RATE_MAX}."
            raise InputError("invalid_input", message, "sample_rate")
        key, mood = parse_key(input.key), parse_mood(input.mood)
        if input.key and key is None:
            message = f"key is {input.key!r}; use names such as C major, F# minor or Eb major."
            raise InputError("invalid_input", message, "key")
        if input.mood and mood is None:
            message = f"mood is {input.mood!r}; accepted are {', '.join(MOODS)} and synonyms."
            raise InputError("invalid_input", message, "mood")
        return PieceSpec(
            input.prompt,
            key=key,
            tempo=_tempo(input),
            mood=mood,
            seconds=self._seconds(input, audio_ms_max),
            seed=input.seed,
            temperature=self._options.temperature,
        )

    def _seconds(self, input: MusicInput, audio_ms_max: int) -> float:
        """Return the requested or the default length, within the entry's limit and the hold."""
        seconds_max = float(self._spec.limits.get("seconds", 600))
        if audio_ms_max:
            seconds_max = min(seconds_max, audio_ms_max / 1000)
        if input.duration_ms is None:
            return min(self._options.seconds, seconds_max)
        if input.duration_ms > seconds_max * 1000:
            message = f"duration_ms is {input.duration_ms}; at most {seconds_max * 1000:g}."
            raise InputError("invalid_input", message, "duration_ms")
        return input.duration_ms / 1000


def _tempo(input: MusicInput) -> int | None:
    """Return the tempo from the field or, without it, from the prompt."""
    accepted = f"accepted are {TEMPOS[0]} to {TEMPOS[-1]}, in whole beats per minute"
    from_prompt = parse_prompt(input.prompt).tempo
    if input.tempo is None:
        if from_prompt is not None and not TEMPOS[0] <= from_prompt <= TEMPOS[-1]:
            message = f"The prompt names {from_prompt} bpm; {accepted}."
            raise InputError("invalid_input", message, "prompt")
        return from_prompt
    if not TEMPOS[0] <= input.tempo <= TEMPOS[-1] or input.tempo != int(input.tempo):
        raise InputError("invalid_input", f"tempo is {input.tempo:g}; {accepted}.", "tempo")
    return int(input.tempo)


def _inverse(order: Sequence[int]) -> list[int]:
    """Invert a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


def _advance(request: MusicRequest, logits: torch.Tensor) -> list[Deferred]:
    """Sample the next token. Return the rendering of the bar that it completes.

    An error fails this request.
    """
    try:
        request.writer.sample(logits)
        return request.render()
    except Exception as error:
        if is_out_of_memory(error):
            request.failure = out_of_memory(request.usage())
        else:
            log.exception("music generation failed", extra={"request_id": request.job.request_id})
            message = "The engine failed on this request."
            request.failure = Failed("engine_error", message, usage=request.usage())
    return []


def _outcome(request: MusicRequest) -> Outcome | Deferred | None:
    if request.cancelled is not None:
        return Cancelled(request.cancelled, usage=request.usage())
    if request.failure is not None:
        return request.failure
    if not request.writer.ended:
        return None
    return Deferred(request.completed, usage=request.usage())
