"""The engine of speech and music: any request can advance between the steps of the others.

A segment is synthesised in a pipeline run of its own, which is suspended before each forward of
``SpeechModel.steps`` and at each frame of a ``TokenLoop``, where runs share a batch. So a short
request does not wait for a long one, a cancellation takes effect at the next step, and each request
is charged for its own steps. Every segment has its own random numbers, derived from the request's
seed: the audio does not depend on other requests, and a second attempt reproduces it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from workers.engines.cooperative_batching import (
    CooperativeBatcher,
    PipelineRun,
    Stopped,
    is_in_run,
)
from workers.engines.memory import is_out_of_memory, memory_of
from workers.engines.speech.families import CLONING_TASK, MUSIC_TASK, Family, family_of, with_dtype
from workers.engines.speech.model import Segment, SpeechModel, Voice, read_recording, read_voice
from workers.engines.speech.options import Options, read_options
from workers.engines.speech.request import AudioInput, SpeechRequest
from workers.engines.speech.text import Language, with_turn_tags
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
from workers.protocol.engine import CancelReason, Deferred, Memory, PhaseClock, StepReport

log = logging.getLogger(__name__)


class SpeechEngine(TorchEngine[Options, SpeechModel, SpeechRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._languages = [Language(tag) for tag in self._options.languages]
        self._batcher = CooperativeBatcher(rows_max=self._options.slots)
        self._suspend = self._batcher.batch_point("step", lambda: None, "forward", batched=False)
        self._family: Family | None = None
        self._voices: dict[str, Voice] = {}

    @property
    def memory(self) -> Memory:
        loop = None if self._loaded is None else self._loaded.loop
        cache_bytes = 0 if loop is None else loop.cache_bytes
        return memory_of(self._options.torch_device, self._weights_bytes, cache_bytes)

    def _inspect(self) -> None:
        self._read_family()

    def _load(self) -> SpeechModel:
        self._family = self._read_family()
        path = Path(self._spec.checkpoint or "")
        model = self._family.load(path, self._options)
        self._choose_threads(model.module)
        self._voices = {}
        for name, voice_options in self._options.voices.items():
            rate = model.recording_rate
            voice = read_voice(name, voice_options, root=path, rate=rate, limits=self._options)
            try:
                self._voices[name] = model.check(voice)
            except ValueError as error:
                raise ValueError(f"the voice {name!r} cannot be used: {error}") from error
        torch.manual_seed(0)
        with torch.no_grad():
            model.synthesize(Segment("Hello.", self._voice(""), 0.5), lambda _: None)
        for module in model.steps:
            module.register_forward_pre_hook(self._suspend_run)
        if (loop := model.loop) is not None:
            loop.step = self._batcher.batch_point(
                "tokens", loop.advance, "forward", module=loop.module
            )
        return model

    def _read_family(self) -> Family:
        family = family_of(self._spec)
        self._options = with_dtype(self._options, family, self._spec)
        return family

    def unload(self) -> None:
        self._voices = {}
        self._batcher.forget()
        super().unload()

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        self._start_segments()
        turn = self._batcher.turn(clock.phase)
        by_run = {
            id(request.run): request
            for request in self._running.values()
            if request.run is not None
        }
        weights, preprocess = (
            {
                by_run[key].job.request_id: float(number)
                for key, number in numbers.items()
                if key in by_run
            }
            for numbers in (turn.rows, turn.preprocess_s)
        )
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome | Deferred]] = []
        with clock.phase("postprocess"):
            ended = {id(run) for run in turn.ended}
            for request_id, request in self._running.items():
                emitted = self._advance(request, ended=id(request.run) in ended)
                events += [(request_id, event) for event in emitted]
                if (outcome := _outcome(request)) is not None:
                    outcomes.append((request_id, outcome))
        if not weights:
            weights = dict.fromkeys((id_ for id_, _ in (*events, *outcomes)), 1.0)
        return StepReport(weights, events, outcomes, preprocess)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        super().cancel(request_id, reason)
        if (run := self._running[request_id].run) is not None:
            self._batcher.stop(run)

    def release(self, request_id: RequestId) -> None:
        request = self._running.pop(request_id)
        if request.run is not None and not request.run.ended:
            self._batcher.stop(request.run)

    # --- Input ------------------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> SpeechRequest:
        if job.task not in (self._spec.task, *self._spec.also):
            raise InputError("invalid_input", f"{self._spec.name} does not support {job.task}.")
        kind: type[AudioInput] = MusicInput if job.task == MUSIC_TASK else SpeechInput
        input = read_input(job, kind)
        self._check(input)
        if isinstance(input, MusicInput):
            segments, speed = [self._music_segment(input)], 1.0
        else:
            segments = self._speech_segments(job, input, files)
            speed = min(SPEED_MAX, max(SPEED_MIN, input.speed * segments[0].voice.speed))
        rate = self._model.rate
        has_speed = self._model.has_speed
        origin = Origin(self._spec.name, str(job.request_id), input.seed)
        return SpeechRequest(
            job=job,
            input=input,
            segments=[replace(segment, speed=speed) for segment in segments]
            if has_speed
            else segments,
            output=AudioOutput(input, origin, rate=rate, stream=job.stream),
            crossfader=Crossfader(rate, pause_ms=self._options.pause_ms),
            stretcher=TimeStretcher(rate, 1.0 if has_speed else speed),
            samples_max=job.limits.audio_ms * rate // 1000 or None,
        )

    def _check(self, input: AudioInput) -> None:
        """Raise ``InputError`` for a parameter that the model would otherwise ignore."""
        name, rate = self._spec.name, input.sample_rate
        if rate is not None and not RATE_MIN <= rate <= RATE_MAX:
            raise InputError(
                "invalid_input",
                f"sample_rate is {rate}; accepted are {RATE_MIN} to {RATE_MAX}.",
                "sample_rate",
            )
        if input.parameters:
            field = min(input.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)
        if isinstance(input, MusicInput):
            if input.lyrics:
                raise InputError(
                    "unsupported_parameter", f"{name} does not support lyrics.", "lyrics"
                )
            return
        if input.instructions:
            raise InputError(
                "unsupported_parameter", f"{name} does not support instructions.", "instructions"
            )
        if not SPEED_MIN <= input.speed <= SPEED_MAX:
            raise InputError(
                "invalid_input",
                f"speed is {input.speed:g}; accepted are {SPEED_MIN:g} to {SPEED_MAX:g}.",
                "speed",
            )

    def _speech_segments(
        self, job: Job, input: SpeechInput, files: Sequence[bytes]
    ) -> list[Segment]:
        assert self._family is not None
        language = self._language(input.language)
        voice = self._voice_of(job, input, files)
        sentences = language.sentences(
            input.text,
            characters_max=self._options.sentence_characters or self._family.sentence_characters,
            normalize=self._options.normalize,
        )
        if not sentences:
            raise InputError(
                "invalid_input", "The text contains nothing that can be pronounced.", "text"
            )
        if self._family.turn_tags:
            sentences = with_turn_tags(sentences)
        return [Segment(text, voice, self._options.sentence_seconds) for text in sentences]

    def _music_segment(self, input: MusicInput) -> Segment:
        """Describe the requested music as a caption, which is all that the model reads."""
        phrases = [input.prompt.strip(), input.mood]
        phrases.append(f"in {input.key}" if input.key else "")
        phrases.append("" if input.tempo is None else f"{input.tempo:g} bpm")
        seconds = (input.duration_ms or 0) / 1000 or self._options.seconds
        if seconds > (seconds_max := float(self._spec.limits.get("seconds", seconds))):
            message = f"duration_ms is {input.duration_ms}; at most {seconds_max * 1000:g}."
            raise InputError("invalid_input", message, "duration_ms")
        return Segment(", ".join(phrase for phrase in phrases if phrase), self._voice(""), seconds)

    def _language(self, tag: str) -> Language:
        """Return the requested language, with its region, if the entry has it in any region."""
        if not tag:
            return self._languages[0]
        accepted = ", ".join(self._options.languages)
        try:
            language = Language(tag)
        except ValueError as error:
            message = f"{error}; accepted are {accepted}."
            raise InputError("invalid_input", message, "language") from error
        if language.name not in (known.name for known in self._languages):
            raise InputError(
                "unsupported_parameter",
                f"{self._spec.name} does not support language {tag}; it supports {accepted}.",
                "language",
            )
        return language

    def _voice_of(self, job: Job, input: SpeechInput, files: Sequence[bytes]) -> Voice:
        if not input.recording:
            if job.task == CLONING_TASK:
                message = "This task needs a recording of the voice."
                raise InputError("invalid_input", message, "recording")
            if input.voice and input.voice not in self._voices:
                accepted = f"one of {', '.join(self._voices)}" if self._voices else "none"
                message = f"voice is {input.voice!r}; {self._spec.name} accepts {accepted}."
                raise InputError("invalid_input", message, "voice")
            return self._voice(input.voice)
        if self._model.recording_rate is None:
            message = f"{self._spec.name} does not support voices from recordings."
            raise InputError("unsupported_parameter", message, "recording")
        if not files:
            raise InputError("invalid_input", "The recording is missing.", "recording")
        with reading("recording"):
            recording = read_recording(files[-1], self._model.recording_rate, self._options)
        voice = Voice("", recording=recording, transcript=input.transcript)
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

    def _start_segments(self) -> None:
        for request in self._running.values():
            if request.run is None and request.cancelled is None and not request.ended:
                request.run = PipelineRun(
                    self._make_run(request, self._model), priority=request.job.priority
                )
                self._batcher.start(request.run)

    def _make_run(self, request: SpeechRequest, model: SpeechModel) -> Any:
        index = request.segment
        mixed = np.random.SeedSequence((request.input.seed % 2**64, index))
        seed = int(mixed.generate_state(1, np.uint64)[0])
        segment = replace(request.segments[index], seed=seed)

        def work() -> None:
            torch.manual_seed(seed)
            model.synthesize(segment, request.append)

        return work

    def _suspend_run(self, module: torch.nn.Module, args: Any) -> None:
        """Let other runs proceed; restore this run's random state afterwards."""
        if not is_in_run():
            return
        cpu_state = torch.get_rng_state()
        cuda_state = (
            torch.cuda.get_rng_state() if self._options.torch_device.type == "cuda" else None
        )
        if cuda_state is not None:
            torch.cuda.synchronize()  # so that the pending work is timed as this request's
        self._suspend()
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    def _advance(self, request: SpeechRequest, *, ended: bool) -> list[Event]:
        """Emit pending audio, and finish the segment if its run has ended."""
        if request.cancelled is not None:
            return []
        if not ended or request.run is None:
            return request.emit()
        error = request.run.error
        if error is None:
            return request.finish_segment()
        request.failure = _failure(error, request)
        if request.failure.code == "engine_error":
            log.error(
                "speech synthesis failed",
                extra={"request_id": request.job.request_id},
                exc_info=error,
            )
        return []


def _outcome(request: SpeechRequest) -> Outcome | Deferred | None:
    if request.cancelled is not None:
        return Cancelled(request.cancelled, usage=request.usage())
    if request.failure is not None:
        return request.failure
    return Deferred(request.completed, usage=request.usage()) if request.ended else None


def _failure(error: BaseException, request: SpeechRequest) -> Failed:
    if type(error).__name__ == "AcceleratorError":  # sticky: the device is lost
        raise error
    if isinstance(error, Stopped):
        return Failed("engine_error", "The request was stopped.", usage=request.usage())
    if is_out_of_memory(error):
        return out_of_memory(request.usage())
    return Failed("engine_error", "The engine failed on this request.", usage=request.usage())
