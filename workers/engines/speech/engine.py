"""The engine of speech and music: any request may go on after each forward of the others'.

A line is spoken by unmodified library code, which waits wherever the model begins a step of its own
(``SpeechModel.steps``) until it is its turn. So a short request is not held up
by a long one, a cancel takes effect at the next step, and each is charged for its own steps.
Every line has random numbers of its own, from the request's seed: what is said does not depend on
who else speaks, and a second attempt says it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from workers.contract.jobs import (
    Cancelled,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
)
from workers.contract.media import (
    RATE_MAX,
    RATE_MIN,
    SPEED_MAX,
    SPEED_MIN,
    MusicInput,
    SpeechInput,
)
from workers.contract.models import ModelSpec
from workers.engines.audio_output import AudioOutput
from workers.engines.cooperative_batching import CooperativeBatcher, PipelineRun, Stopped
from workers.engines.memory import is_out_of_memory
from workers.engines.speech.families import CLONING_TASK, MUSIC_TASK, Family, family_of
from workers.engines.speech.model import Segment, SpeechModel, Voice, read_voice, recorded
from workers.engines.speech.options import Options, read_options
from workers.engines.speech.request import Asked, SpeechRequest
from workers.engines.speech.text import Language, with_turns
from workers.engines.threads import use_threads
from workers.engines.torch_engine import (
    InputError,
    TorchEngine,
    out_of_memory,
    read_input,
    reading,
)
from workers.media.crossfade import Crossfader, TimeStretcher
from workers.media.encode import Origin
from workers.protocol.engine import CancelReason, Estimate, PhaseClock, StepReport

log = logging.getLogger(__name__)

_CHARACTER_US: Final = 5_000
"""A guess that only orders requests."""
_CHARACTER_BYTES: Final = 64 * 1024


class SpeechEngine(TorchEngine[Options, SpeechModel, SpeechRequest]):
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._languages = [Language(tag) for tag in self._options.languages]
        self._rendezvous = CooperativeBatcher(rows_max=1)
        self._meet = self._rendezvous.batch_point("step", lambda: None, "forward", batched=False)
        self._family: Family | None = None
        self._voices: dict[str, Voice] = {}

    def _load(self) -> SpeechModel:
        self._family = family_of(self._spec)
        path = Path(self._spec.checkpoint or "")
        talker = self._family.load(path, self._options)
        self._choose_threads(talker.module)
        self._voices = {}
        for name, given in self._options.voices.items():
            rate = talker.recording_rate
            voice = read_voice(name, given, root=path, rate=rate, limits=self._options)
            try:
                self._voices[name] = talker.check(voice)
            except ValueError as error:
                raise ValueError(f"the voice {name!r} cannot be used: {error}") from error
        torch.manual_seed(0)
        with torch.no_grad():
            talker.speak(Segment("Hello.", self._voice(""), 0.5), lambda _: None)
        for module in talker.steps:
            module.register_forward_pre_hook(self._pause)
        return talker

    def unload(self) -> None:
        self._voices = {}
        super().unload()

    def estimate(self, job: Job) -> Estimate:
        size = len(str(job.input.get("text") or job.input.get("prompt") or ""))
        return Estimate(size * _CHARACTER_US, min(size, 1_000) * _CHARACTER_BYTES)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        self._start_lines()
        turn = self._rendezvous.turn(clock.phase)
        by_run = {id(one.run): one for one in self._running.values() if one.run is not None}
        weights: dict[RequestId, float] = {
            by_run[key].job.request_id: float(rows)
            for key, rows in turn.rows.items()
            if key in by_run
        }
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        with clock.phase("postprocess"):
            ended = {id(run) for run in turn.ended}
            for request_id, one in self._running.items():
                said = self._go_on(one, ended=id(one.run) in ended)
                events += [(request_id, event) for event in said]
                if (outcome := _outcome(one)) is not None:
                    outcomes.append((request_id, outcome))
        if not weights:
            weights = dict.fromkeys((id_ for id_, _ in (*events, *outcomes)), 1.0)
        return StepReport(weights, events, outcomes)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        super().cancel(request_id, reason)
        if (run := self._running[request_id].run) is not None:
            self._rendezvous.stop(run)

    def release(self, request_id: RequestId) -> None:
        one = self._running.pop(request_id)
        if one.run is not None and not one.run.ended:
            self._rendezvous.stop(one.run)

    # --- What is asked for ------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> SpeechRequest:
        if job.task not in (self._spec.task, *self._spec.also):
            raise InputError("invalid_input", f"{self._spec.name} does not do {job.task}.")
        kind: type[Asked] = MusicInput if job.task == MUSIC_TASK else SpeechInput
        asked = read_input(job, kind)
        self._check(asked)
        if isinstance(asked, MusicInput):
            lines, speed = [self._piece(asked)], 1.0
        else:
            lines, speed = self._lines(job, asked, files), asked.speed
        rate = self._model.rate
        own = self._model.own_speed
        origin = Origin(self._spec.name, str(job.request_id), asked.seed)
        return SpeechRequest(
            job=job,
            asked=asked,
            lines=[replace(line, speed=speed) for line in lines] if own else lines,
            track=AudioOutput(asked, origin, rate=rate, stream=job.stream),
            joiner=Crossfader(rate, pause_ms=self._options.pause_ms),
            tempo=TimeStretcher(rate, 1.0 if own else speed),
            most=job.limits.audio_ms * rate // 1000 or None,
        )

    def _check(self, asked: Asked) -> None:
        """Refuse by name what this model cannot do, rather than leave it out."""
        name, rate = self._spec.name, asked.sample_rate
        if rate is not None and not RATE_MIN <= rate <= RATE_MAX:
            raise InputError(
                "invalid_input",
                f"sample_rate is {rate}; accepted are {RATE_MIN} to {RATE_MAX}.",
                "sample_rate",
            )
        if asked.parameters:
            field = min(asked.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)
        if isinstance(asked, MusicInput):
            if asked.lyrics:
                raise InputError("unsupported_parameter", f"{name} does not sing.", "lyrics")
            return
        if asked.instructions:
            raise InputError(
                "unsupported_parameter", f"{name} takes no instructions.", "instructions"
            )
        if not SPEED_MIN <= asked.speed <= SPEED_MAX:
            raise InputError(
                "invalid_input",
                f"speed is {asked.speed:g}; accepted are {SPEED_MIN:g} to {SPEED_MAX:g}.",
                "speed",
            )

    def _lines(self, job: Job, asked: SpeechInput, files: Sequence[bytes]) -> list[Segment]:
        assert self._family is not None
        language = self._language(asked.language)
        voice = self._voice_of(job, asked, files)
        sentences = language.sentences(
            asked.text,
            most=self._options.sentence_characters or self._family.sentence_characters,
            normalize=self._options.normalize,
        )
        if not sentences:
            raise InputError("invalid_input", "There is nothing to be said in the text.", "text")
        if self._family.turns:
            sentences = with_turns(sentences)
        return [Segment(text, voice, self._options.sentence_seconds) for text in sentences]

    def _piece(self, asked: MusicInput) -> Segment:
        """What is asked for, in the words of a caption."""
        wishes = [asked.prompt.strip(), asked.mood]
        wishes.append(f"in {asked.key}" if asked.key else "")
        wishes.append("" if asked.tempo is None else f"{asked.tempo:g} bpm")
        seconds = (asked.duration_ms or 0) / 1000 or self._options.seconds
        if seconds > (most := float(self._spec.limits.get("seconds", seconds))):
            message = f"duration_ms is {asked.duration_ms}; at most {most * 1000:g}."
            raise InputError("invalid_input", message, "duration_ms")
        return Segment(", ".join(wish for wish in wishes if wish), self._voice(""), seconds)

    def _language(self, tag: str) -> Language:
        """The entry's language that a request means, in the region that it names."""
        if not tag:
            return self._languages[0]
        accepted = ", ".join(self._options.languages)
        try:
            asked = Language(tag)
        except ValueError as error:
            message = f"{error}; accepted are {accepted}."
            raise InputError("invalid_input", message, "language") from error
        if asked.name not in (language.name for language in self._languages):
            raise InputError(
                "unsupported_parameter",
                f"{self._spec.name} does not speak {tag}; it speaks {accepted}.",
                "language",
            )
        return asked

    def _voice_of(self, job: Job, asked: SpeechInput, files: Sequence[bytes]) -> Voice:
        if not asked.recording:
            if job.task == CLONING_TASK:
                message = "This task speaks in the voice of a recording; send one."
                raise InputError("invalid_input", message, "recording")
            if asked.voice and asked.voice not in self._voices:
                known = (
                    f"its voices are {', '.join(self._voices)}" if self._voices else "it has one"
                )
                message = f"{self._spec.name} has no voice {asked.voice!r}; {known}."
                raise InputError("invalid_input", message, "voice")
            return self._voice(asked.voice)
        if self._model.recording_rate is None:
            message = f"{self._spec.name} takes no voice from a recording."
            raise InputError("unsupported_parameter", message, "recording")
        if not files:
            raise InputError("invalid_input", "The recording is missing.", "recording")
        with reading("recording"):
            sound = recorded(files[-1], self._model.recording_rate, self._options)
        voice = Voice("", recording=sound, transcript=asked.transcript)
        try:
            return self._model.check(voice)
        except ValueError as error:
            raise InputError(
                "invalid_input", f"This voice cannot be used: {error}.", "recording"
            ) from error

    def _voice(self, name: str) -> Voice:
        if not self._voices:
            return Voice()
        return self._voices[name] if name else next(iter(self._voices.values()))

    # --- Steps ------------------------------------------------------------------------------------

    def _start_lines(self) -> None:
        for one in self._running.values():
            if one.run is None and one.cancelled is None and not one.ended:
                one.run = PipelineRun(self._work(one, self._model), priority=one.job.priority)
                self._rendezvous.start(one.run)

    def _work(self, one: SpeechRequest, talker: SpeechModel) -> Any:
        line, place = one.lines[one.place], one.place

        def work() -> None:
            mixed = np.random.SeedSequence((one.asked.seed % 2**64, place))
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0]))
            talker.speak(line, one.say)

        return work

    def _pause(self, module: torch.nn.Module, args: Any) -> None:
        """Let others go on, who have random numbers of their own."""
        here = torch.get_rng_state()
        there = torch.cuda.get_rng_state() if self._options.torch_device.type == "cuda" else None
        if there is not None:
            torch.cuda.synchronize()  # what was begun belongs to whom it was begun for
        self._meet()
        torch.set_rng_state(here)
        if there is not None:
            torch.cuda.set_rng_state(there)

    def _go_on(self, one: SpeechRequest, *, ended: bool) -> list[Event]:
        """Take what was said; events of it."""
        if one.cancelled is not None:
            return []
        if not ended or one.run is None:
            return one.take()
        error = one.run.error
        if error is None:
            return one.end_line()
        one.failure = _failure(error, one)
        if one.failure.code == "engine_error":
            log.error("speech failed", extra={"request_id": one.job.request_id}, exc_info=error)
        return []


def _outcome(one: SpeechRequest) -> Outcome | None:
    if one.cancelled is not None:
        return Cancelled(one.cancelled, usage=one.usage())
    if one.failure is not None:
        return one.failure
    return one.completed() if one.ended else None


def _failure(error: BaseException, one: SpeechRequest) -> Failed:
    name = type(error).__name__
    if name == "AcceleratorError":  # sticky: the device is gone
        raise error
    if isinstance(error, Stopped):
        return Failed("engine_error", "The request was stopped.", usage=one.usage())
    if is_out_of_memory(error):
        return out_of_memory(one.usage())
    return Failed("engine_error", "The engine failed on this request.", usage=one.usage())
