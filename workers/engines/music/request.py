"""One request while it is written and played: its notes, its sound so far, and the stream of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from workers.contract.jobs import Completed, Event, Failed, Job, Progress, Usage
from workers.contract.media import File, Medium, MusicInput, characters
from workers.engines.audio_output import AudioOutput
from workers.engines.music.instruments import Bank
from workers.engines.music.midi import write_midi
from workers.engines.music.synth import Player, Stereo
from workers.engines.music.writer import Writing
from workers.protocol.engine import CancelReason

RATE: Final = 48_000
"""At which everything is played, in Hz."""
MIDI_TYPE: Final = "audio/midi"
_FADE: Final = RATE // 2


@dataclass(slots=True, eq=False)
class MusicRequest:
    """``place`` is the request's among the slots."""

    job: Job
    asked: MusicInput
    writing: Writing
    samples_max: int
    """No piece is longer than it was ordered."""
    track: AudioOutput
    bank: Bank
    place: int
    player: Player | None = None
    played: int = 0
    """Bars."""
    failure: Failed | None = None
    cancelled: CancelReason | None = None

    def hear(self) -> list[Event]:
        """Play what has been written since the last time."""
        writing, events = self.writing, list[Event]()
        if writing.head is None:
            return events
        if self.player is None:
            self.player = Player(writing.head, rate=RATE, bank=self.bank)
        for bar in writing.bars[self.played :]:
            events += self.track.add(self.player.play(bar))
            self.played += 1
            events.append(Progress(self.played, writing.count))
        if writing.ended:
            events += self.track.add(self._faded(self.player.finish()))
            events += self.track.finish()
        return events

    def _faded(self, rest: Stereo) -> Stereo:
        """What rings on, as far as there is time for it."""
        room = self.samples_max - self.track.samples
        if len(rest) > room:
            rest = rest[:room]
            falling = np.linspace(1, 0, min(room, _FADE), dtype=np.float32)
            rest[room - len(falling) :] *= falling[:, None]
        return rest

    def usage(self) -> Usage:
        counted = characters(self.asked.prompt)
        return Usage(requests=1, characters=counted, audio_ms=self.track.duration_ms)

    def completed(self) -> Completed:
        """The whole as a file, and its notes as another."""
        assert self.writing.head is not None
        notes = write_midi(replace(self.writing.head, bars=tuple(self.writing.bars)))
        score = Medium("audio", blob=1, role="score", content_type=MIDI_TYPE, seed=self.asked.seed)
        output: dict[str, Any] = {"media": [self.track.medium(), score]}
        files = (self.track.file(), File(MIDI_TYPE, notes))
        return Completed(self.usage(), output=output, files=files)
