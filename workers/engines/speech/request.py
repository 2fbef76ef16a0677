"""One request while it is spoken: its lines, the sound so far, and the stream made of it."""

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

Asked: TypeAlias = SpeechInput | MusicInput


@dataclass(slots=True, eq=False)
class SpeechRequest:
    """``track``, ``tempo`` and ``joiner`` are at the model's rate."""

    job: Job
    asked: Asked
    lines: Sequence[Segment]
    track: AudioOutput
    joiner: Crossfader
    tempo: TimeStretcher
    most: int | None = None
    """Samples that it may come to: what is held for."""
    place: int = 0
    """Of the line that is spoken now, or next."""
    run: PipelineRun | None = None
    said: list[Mono] = field(default_factory=list)
    """By the line that is spoken now, and not taken yet."""
    heard: int = 0
    """Lines of which anything was heard."""
    cut: bool = False
    """Whether there was more than it may come to."""
    closed: bool = False
    """Nothing follows."""
    failure: Failed | None = None
    cancelled: CancelReason | None = None

    def say(self, sound: torch.Tensor) -> None:
        """Take sound from the model."""
        heard = sound.detach().reshape(-1).to("cpu", torch.float32).numpy()
        self.said.append(np.nan_to_num(heard).clip(-1, 1))

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.closed

    def take(self) -> list[Event]:
        """Pass on what the line has said since the last time."""
        said, self.said = self.said, []
        events: list[Event] = []
        for piece in said:
            if self.heard <= self.place:
                self.heard = self.place + 1
                self.track.characters = self.usage().characters
            events += self._hear(self.tempo.add(self.joiner.add(piece)))
        return events + self._close() if self.cut else events

    def end_line(self) -> list[Event]:
        """The line has been spoken; with the last one the sound is whole."""
        events = self.take()
        self.run = None
        self.place = self.heard = self.place + 1
        if self.closed:
            return events
        events += self._hear(self.tempo.add(self.joiner.cut()))
        last = self.place == len(self.lines)
        if last:
            rest = (self.tempo.add(self.joiner.finish()), self.tempo.finish())
            events += self._hear(np.concatenate(rest))
        if last and not self.track.samples:
            message = "The text has nothing that this model can say."
            self.failure = Failed("invalid_input", message, param="text")
        elif last or self.cut:
            events += self._close()
        return [*events, Progress(self.place, len(self.lines))]

    def _close(self) -> list[Event]:
        self.closed = True
        return self.track.finish()

    def _hear(self, samples: Mono) -> list[Event]:
        room = len(samples) if self.most is None else self.most - self.track.samples
        self.cut = self.cut or len(samples) > room
        samples = samples[:room]
        return self.track.add(samples) if len(samples) else []

    def usage(self) -> Usage:
        """Of a request that broke off, the characters of the lines that were begun to be heard."""
        sizes, asked = [len(line.text) for line in self.lines], self.asked
        text = asked.text if isinstance(asked, SpeechInput) else f"{asked.prompt}{asked.lyrics}"
        counted = -(-characters(text) * sum(sizes[: self.heard]) // max(1, sum(sizes)))
        return Usage(requests=1, characters=counted, audio_ms=self.track.duration_ms)

    def completed(self) -> Completed:
        """The whole as a file."""
        medium = self.track.medium(cut=self.cut and isinstance(self.asked, SpeechInput))
        output: dict[str, Any] = {"media": [medium]}
        return Completed(self.usage(), output=output, files=(self.track.file(),))
