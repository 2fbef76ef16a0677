"""State of one speech or music request: segments, audio so far, and the stream built from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from workers.contract.jobs import Completed, Event, Failed, Job, Progress, Usage
from workers.contract.media import MusicInput, SpeechInput, characters
from workers.engines.audio_output import AudioOutput
from workers.engines.cooperative_batching import PipelineRun
from workers.engines.speech.model import Mono, Segment
from workers.media.crossfade import Crossfader, TimeStretcher
from workers.protocol.engine import CancelReason

AudioInput: TypeAlias = SpeechInput | MusicInput


@dataclass(slots=True, eq=False)
class SpeechRequest:
    """``output``, ``stretcher`` and ``crossfader`` work at the model's sample rate."""

    job: Job
    input: AudioInput
    segments: Sequence[Segment]
    output: AudioOutput
    crossfader: Crossfader
    stretcher: TimeStretcher
    samples_max: int | None = None
    """Maximum length of the output, as covered by the hold. None: unlimited."""
    segment: int = 0
    """Index of the segment being synthesised or, between two, of the next one."""
    run: PipelineRun | None = None
    pending: list[Mono] = field(default_factory=list)
    """Audio of the current segment, not emitted yet: one array for each ``append``."""
    segments_emitted: int = 0
    """Segments of which any audio has been emitted; what a partial request is charged for."""
    truncated: bool = False
    """Whether audio beyond ``samples_max`` was dropped."""
    closed: bool = False
    """Whether the output has ended: no audio follows."""
    failure: Failed | None = None
    cancelled: CancelReason | None = None

    def append(self, audio: torch.Tensor) -> None:
        """Add audio from the model: any shape, dtype and device; clipped to [-1, 1], NaN to 0."""
        samples = audio.detach().reshape(-1).to("cpu", torch.float32).numpy()
        self.pending.append(np.nan_to_num(samples).clip(-1, 1))

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.closed

    def emit(self) -> list[Event]:
        """Pass pending audio to the output. Return the stream's new events."""
        pending, self.pending = self.pending, []
        events: list[Event] = []
        for audio in pending:
            if self.segments_emitted <= self.segment:
                self.segments_emitted = self.segment + 1
                self.output.characters = self.usage().characters
            events += self._write(self.stretcher.add(self.crossfader.add(audio)))
        return events + self._close() if self.truncated else events

    def finish_segment(self) -> list[Event]:
        """Complete the current segment and, after the last one, the output.

        Fail the request as ``invalid_input`` if no segment produced any audio.
        """
        events = self.emit()
        self.run = None
        self.segment = self.segments_emitted = self.segment + 1
        if self.closed:
            return events
        events += self._write(self.stretcher.add(self.crossfader.end_segment()))
        last = self.segment == len(self.segments)
        if last:
            rest = (self.stretcher.add(self.crossfader.finish()), self.stretcher.finish())
            events += self._write(np.concatenate(rest))
        if last and not self.output.samples:
            message = "The text contains nothing that this model can pronounce."
            self.failure = Failed("invalid_input", message, param="text")
        elif last or self.truncated:
            events += self._close()
        return [*events, Progress(self.segment, len(self.segments))]

    def _close(self) -> list[Event]:
        self.closed = True
        return self.output.finish()

    def _write(self, samples: Mono) -> list[Event]:
        room = len(samples) if self.samples_max is None else self.samples_max - self.output.samples
        self.truncated = self.truncated or len(samples) > room
        samples = samples[:room]
        return self.output.add(samples) if len(samples) else []

    def usage(self) -> Usage:
        """Return the usage so far.

        A partial request is charged for the segments whose audio has begun: its characters are
        prorated by their length, rounded up.
        """
        sizes, input = [len(segment.text) for segment in self.segments], self.input
        text = input.text if isinstance(input, SpeechInput) else f"{input.prompt}{input.lyrics}"
        emitted = sum(sizes[: self.segments_emitted])
        counted = -(-characters(text) * emitted // max(1, sum(sizes)))
        return Usage(requests=1, characters=counted, audio_ms=self.output.duration_ms)

    def completed(self) -> Completed:
        """Return the outcome, with all audio as one file."""
        medium = self.output.medium(cut=self.truncated and isinstance(self.input, SpeechInput))
        output: dict[str, Any] = {"media": [medium]}
        return Completed(self.usage(), output=output, files=(self.output.file(),))
