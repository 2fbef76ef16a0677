"""The engine of music that is written as notes: a token for each piece in a step, in one forward.

The model runs on the decoder of language models, where nobody's logits depend on who else is there,
and each piece draws from random numbers of its own: the same seed writes the same piece, whatever
the load. A bar is played as soon as it is written, so a piece is heard while the rest of it is
still to come, and ends between two notes when it is cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import AutoTokenizer

from workers.contract.jobs import Cancelled, Event, Failed, Job, Outcome, RequestId
from workers.contract.media import RATE_MAX, RATE_MIN, MusicInput, characters
from workers.contract.models import ModelSpec
from workers.engines.audio_output import AudioOutput
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Weights
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.loading import make_decoder
from workers.engines.memory import is_out_of_memory
from workers.engines.music.instruments import Bank
from workers.engines.music.notes import MARKS, MOODS, TEMPOS, TOKENS
from workers.engines.music.options import Options, decoding, read_options
from workers.engines.music.prompt import key_named, mood_named, read
from workers.engines.music.request import RATE, MusicRequest
from workers.engines.music.writer import PieceOrder, Writing
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, out_of_memory, read_input
from workers.media.encode import Origin
from workers.protocol.engine import Estimate, PhaseClock, StepReport

log = logging.getLogger(__name__)

TASK: Final = "text-to-music"
_BAR_WEIGHT: Final = 25.0
"""To play a bar takes as long as to write so many tokens; measured with pocket-music."""
_SECOND_US: Final = 200_000
"""Of device time for a second of music: a guess that only orders requests."""
_SECOND_BYTES: Final = RATE * 2 * 4


@dataclass(frozen=True, slots=True)
class _Loaded:
    decoder: Decoder
    vocabulary: Mapping[str, int]
    context: int
    tables: tuple[tuple[int, ...], ...]
    """Of each place among the slots, the blocks of the cache that are its own."""


class MusicEngine(TorchEngine[Options, _Loaded, MusicRequest]):
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._bank = Bank(RATE)

    def _load(self) -> _Loaded:
        for task in (self._spec.task, *self._spec.also):
            if task != TASK:
                raise ValueError(f"the engine music does {TASK}, not {task}")
        options = decoding(self._options)
        weights = Weights(self._spec, options)
        tokenizer = AutoTokenizer.from_pretrained(
            weights.path, local_files_only=True, trust_remote_code=False
        )
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        if lacking := next((t for t in (*MARKS, *TOKENS) if t not in vocabulary), None):
            raise ValueError(f"the checkpoint writes no music: its tokenizer lacks {lacking}")
        self._choose_threads(weights.model)
        each = -(-weights.context // weights.shape.block_tokens)
        first = [1 + place * each for place in range(self._options.slots)]
        tables = tuple(tuple(range(begin, begin + each)) for begin in first)
        decoder = make_decoder(weights, options)
        return _Loaded(decoder, vocabulary, weights.context, tables)

    def unload(self) -> None:
        self._bank = Bank(RATE)
        super().unload()

    def estimate(self, job: Job) -> Estimate:
        asked = job.input.get("duration_ms")
        seconds = asked / 1000 if isinstance(asked, int | float) else self._options.seconds
        return Estimate(round(seconds * _SECOND_US), round(seconds * _SECOND_BYTES))

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        writing = [
            one
            for one in self._running.values()
            if one.cancelled is None and one.failure is None and not one.writing.ended
        ]
        feeds = [self._feed(one) for one in writing]
        events: list[tuple[RequestId, Event]] = []
        weights: dict[RequestId, float] = {}
        with torch.inference_mode():
            logits = self._compute(feeds, clock)
            with clock.phase("postprocess"):
                for one, feed, row in zip(writing, feeds, logits, strict=True):
                    name, bars = one.job.request_id, one.played
                    events += [(name, event) for event in _go_on(one, row)]
                    weights[name] = len(feed.ids) + (one.played - bars) * _BAR_WEIGHT
        with clock.phase("postprocess"):
            outcomes = [
                (name, outcome)
                for name, one in self._running.items()
                if (outcome := _outcome(one)) is not None
            ]
        return StepReport(weights or dict.fromkeys(dict(outcomes), 1.0), events, outcomes)

    # --- One step ---------------------------------------------------------------------------------

    def _feed(self, one: MusicRequest) -> SequenceInput:
        start, ids = one.writing.unread()
        return SequenceInput(ids, start, self._model.tables[one.place])

    def _compute(self, feeds: Sequence[SequenceInput], clock: PhaseClock) -> list[torch.Tensor]:
        """The logits ``(vocabulary,)`` after each feed, on the CPU."""
        decoder = self._model.decoder
        single = [place for place, feed in enumerate(feeds) if len(feed.ids) == 1]
        longer = [place for place, feed in enumerate(feeds) if len(feed.ids) > 1]
        with clock.phase("transfer"):
            staged = decoder.stage([feeds[p] for p in single], [feeds[p] for p in longer])
            decoder.wait()
        with clock.phase("forward"):
            logits = decoder.run(staged).cpu()
        return [logits[row] for row in _inverse([*single, *longer])]

    # --- What is asked for ------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> MusicRequest:
        if job.task != TASK:
            raise InputError("invalid_input", f"{self._spec.name} does not do {job.task}.")
        asked = read_input(job, MusicInput)
        order = self._order(asked, job.limits.audio_ms)
        try:
            writing = Writing(order, self._model.vocabulary, context=self._model.context)
        except ValueError as error:
            raise InputError("invalid_input", f"{error}.", "duration_ms") from error
        origin = Origin(self._spec.name, str(job.request_id), asked.seed)
        track = AudioOutput(asked, origin, rate=RATE, stream=job.stream, channels=2)
        samples = round(order.seconds * RATE)
        track.characters = characters(asked.prompt)
        taken = {one.place for one in self._running.values()}
        place = next(place for place in range(self._options.slots) if place not in taken)
        return MusicRequest(job, asked, writing, samples, track, self._bank, place)

    def _start(self, request_id: RequestId, request: MusicRequest, clock: PhaseClock) -> None:
        with clock.phase("transfer"):
            self._model.decoder.zero_blocks(self._model.tables[request.place])
        super()._start(request_id, request, clock)

    def _order(self, asked: MusicInput, audio_ms_max: int) -> PieceOrder:
        """Refuse by name what this model cannot do, rather than leave it out."""
        name, rate = self._spec.name, asked.sample_rate
        if asked.lyrics:
            raise InputError("unsupported_parameter", f"{name} does not support lyrics.", "lyrics")
        if asked.parameters:
            field = min(asked.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)
        if rate is not None and not RATE_MIN <= rate <= RATE_MAX:
            message = f"sample_rate is {rate}; accepted are {RATE_MIN} to {RATE_MAX}."
            raise InputError("invalid_input", message, "sample_rate")
        key, mood = key_named(asked.key), mood_named(asked.mood)
        if asked.key and key is None:
            message = f"key is {asked.key!r}; accepted are such as C major, F# minor and Eb major."
            raise InputError("invalid_input", message, "key")
        if asked.mood and mood is None:
            message = f"mood is {asked.mood!r}; accepted are {', '.join(MOODS)}, or a like word."
            raise InputError("invalid_input", message, "mood")
        return PieceOrder(
            asked.prompt,
            key=key,
            tempo=_tempo(asked),
            mood=mood,
            seconds=self._seconds(asked, audio_ms_max),
            seed=asked.seed,
            temperature=self._options.temperature,
        )

    def _seconds(self, asked: MusicInput, audio_ms_max: int) -> float:
        """As asked for, or as usual; never more than there is a limit or a hold for."""
        most = float(self._spec.limits.get("seconds", 600))
        if audio_ms_max:
            most = min(most, audio_ms_max / 1000)
        if asked.duration_ms is None:
            return min(self._options.seconds, most)
        if asked.duration_ms > most * 1000:
            message = f"duration_ms is {asked.duration_ms}; at most {most * 1000:g}."
            raise InputError("invalid_input", message, "duration_ms")
        return asked.duration_ms / 1000


def _tempo(asked: MusicInput) -> int | None:
    """Of the field, or of the prompt."""
    accepted = f"accepted are {TEMPOS[0]} to {TEMPOS[-1]}, whole beats a minute"
    told = read(asked.prompt).tempo
    if asked.tempo is None:
        if told is not None and not TEMPOS[0] <= told <= TEMPOS[-1]:
            raise InputError("invalid_input", f"The prompt says {told} bpm; {accepted}.", "prompt")
        return told
    if not TEMPOS[0] <= asked.tempo <= TEMPOS[-1] or asked.tempo != int(asked.tempo):
        raise InputError("invalid_input", f"tempo is {asked.tempo:g}; {accepted}.", "tempo")
    return int(asked.tempo)


def _inverse(places: Sequence[int]) -> list[int]:
    """Where in a list each place stands."""
    return sorted(range(len(places)), key=places.__getitem__)


def _go_on(one: MusicRequest, logits: torch.Tensor) -> list[Event]:
    """Write the next token, and play the bar that it ends. Whatever goes wrong is one request's."""
    try:
        one.writing.choose(logits)
        return one.hear()
    except Exception as error:
        if is_out_of_memory(error):
            one.failure = out_of_memory(one.usage())
        else:
            log.exception("music failed", extra={"request_id": one.job.request_id})
            message = "The engine failed on this request."
            one.failure = Failed("engine_error", message, usage=one.usage())
    return []


def _outcome(one: MusicRequest) -> Outcome | None:
    if one.cancelled is not None:
        return Cancelled(one.cancelled, usage=one.usage())
    if one.failure is not None:
        return one.failure
    if not one.writing.ended:
        return None
    try:
        return one.completed()
    except MemoryError:
        return out_of_memory(one.usage())
