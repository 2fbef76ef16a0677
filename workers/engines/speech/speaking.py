"""One request while it is spoken: its lines, the sound so far, and the stream made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from workers.contract.jobs import (
    SOUND_BYTES_MAX,
    Completed,
    Event,
    Failed,
    Job,
    Progress,
    Sound,
    Usage,
)
from workers.contract.media import File, Medium, MusicInput, SpeechInput, characters
from workers.engines.diffusion.rendezvous import Run
from workers.engines.protocol import CancelReason
from workers.engines.speech.talker import Line, Mono
from workers.media.audio import AUDIO_TYPES, AudioWriter, encode_audio
from workers.media.encode import Origin
from workers.media.joining import Joiner, Tempo
from workers.media.pixels import Audio

Asked: TypeAlias = SpeechInput | MusicInput


@dataclass(slots=True, eq=False)
class Speaking:
    """``rate`` is the model's, in Hz; ``tempo`` and ``joiner`` are at that rate."""

    job: Job
    asked: Asked
    lines: Sequence[Line]
    origin: Origin
    rate: int
    joiner: Joiner
    tempo: Tempo
    writer: AudioWriter | None
    """Of a request that somebody reads along."""
    place: int = 0
    """Of the line that is spoken now, or next."""
    run: Run | None = None
    said: list[Mono] = field(default_factory=list)
    """By the line that is spoken now, and not taken yet."""
    whole: list[Mono] = field(default_factory=list)
    sent: int = 0
    """Bytes of the stream."""
    failure: Failed | None = None
    cancelled: CancelReason | None = None

    def say(self, sound: torch.Tensor) -> None:
        """Take sound from the model."""
        heard = sound.detach().reshape(-1).to("cpu", torch.float32).numpy()
        self.said.append(np.nan_to_num(heard).clip(-1, 1))

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.place >= len(self.lines)

    def take(self) -> list[Event]:
        """Pass on what the line has said since the last time."""
        said, self.said = self.said, []
        events: list[Event] = []
        for piece in said:
            events += self._hear(self.tempo.add(self.joiner.add(piece)))
        return events

    def end_line(self) -> list[Event]:
        """The line has been spoken; with the last one the sound is whole."""
        events = self.take()
        self.run = None
        self.place += 1
        events += self._hear(self.tempo.add(self.joiner.cut()))
        if self.place == len(self.lines):
            rest = (self.tempo.add(self.joiner.finish()), self.tempo.finish())
            events += self._hear(np.concatenate(rest))
            if not self.samples:
                message = "The text has nothing that this model can say."
                self.failure = Failed("invalid_input", message, param="text")
            elif self.writer is not None:
                events += self._pieces(self.writer.finish())
        return [*events, Progress(self.place, len(self.lines))]

    def _hear(self, samples: Mono) -> list[Event]:
        if not len(samples):
            return []
        self.whole.append(samples)
        if self.writer is not None:
            return self._pieces(self.writer.add(samples))
        return [Sound(0, 0, b"", self.duration_ms)]

    def _pieces(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        for at in range(0, len(data), SOUND_BYTES_MAX):
            piece = data[at : at + SOUND_BYTES_MAX]
            events.append(Sound(0, self.sent, piece, self.duration_ms))
            self.sent += len(piece)
        return events

    @property
    def samples(self) -> int:
        return sum(map(len, self.whole))

    @property
    def duration_ms(self) -> int:
        return round(self.samples * 1000 / self.rate)

    def usage(self) -> Usage:
        """Of a request that broke off, the characters of the lines that were begun."""
        sizes = [len(line.text) for line in self.lines]
        begun = self.place + (self.run is not None)
        text = self.asked.text if isinstance(self.asked, SpeechInput) else self.asked.prompt
        counted = -(-characters(text) * sum(sizes[:begun]) // max(1, sum(sizes)))
        return Usage(requests=1, characters=counted, audio_ms=self.duration_ms)

    def completed(self) -> Completed:
        """The whole as a file."""
        kind = AUDIO_TYPES[self.asked.format]
        audio = Audio(np.concatenate(self.whole)[None], self.rate)
        data = encode_audio(
            audio, self.asked.format, rate=self.asked.sample_rate, origin=self.origin
        )
        medium = Medium(
            "audio",
            blob=0,
            content_type=kind,
            duration_ms=self.duration_ms,
            sample_rate=self.asked.sample_rate or self.rate,
            seed=self.asked.seed,
        )
        output: dict[str, Any] = {"media": [medium]}
        return Completed(self.usage(), output=output, files=(File(kind, data),))
