"""State of one music request: its notes, the audio so far, and the stream built from it.

Bars are rendered and encoded on another thread, in order, while the model writes the next ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from workers.contract.jobs import Completed, Event, Failed, Job, Progress, Usage
from workers.contract.media import File, Medium, MusicInput, characters
from workers.engines.audio_output import AudioOutput
from workers.engines.music.instruments import Bank
from workers.engines.music.midi import write_midi
from workers.engines.music.notes import Bar
from workers.engines.music.synth import Player, Stereo
from workers.engines.music.writer import PieceWriter
from workers.protocol.engine import CancelReason, Deferred

RATE: Final = 48_000
"""Sample rate of all rendered music, in Hz."""
MIDI_TYPE: Final = "audio/midi"
_FADE: Final = RATE // 2


@dataclass(slots=True, eq=False)
class MusicRequest:
    job: Job
    input: MusicInput
    writer: PieceWriter
    samples_max: int
    """Requested length; the audio never exceeds it."""
    output: AudioOutput
    bank: Bank
    slot: int
    player: Player | None = None
    bars_deferred: int = 0
    """Number of bars that have been, or will be, rendered."""
    failure: Failed | None = None
    cancelled: CancelReason | None = None

    def render(self) -> list[Deferred]:
        """Return the rendering of the bars completed since the last call, as deferred events."""
        writer = self.writer
        if writer.head is None:
            return []
        if self.player is None:
            self.player = Player(writer.head, rate=RATE, bank=self.bank)
        player, first = self.player, self.bars_deferred
        self.bars_deferred = len(writer.bars)
        parts = [
            Deferred(partial(self._render_bar, player, bar, number))
            for number, bar in enumerate(writer.bars[first:], first + 1)
        ]
        return [*parts, Deferred(partial(self._finish, player))] if writer.ended else parts

    def _render_bar(self, player: Player, bar: Bar, number: int) -> list[Event]:
        return [*self.output.add(player.play(bar)), Progress(number, self.writer.count)]

    def _finish(self, player: Player) -> list[Event]:
        return self.output.add(self._fade_out(player.finish())) + self.output.finish()

    def _fade_out(self, rest: Stereo) -> Stereo:
        """Cut what rings on after the last bar to the requested length, with a fade."""
        samples_left = self.samples_max - self.output.samples
        if len(rest) > samples_left:
            rest = rest[:samples_left]
            fade = np.linspace(1, 0, min(samples_left, _FADE), dtype=np.float32)
            rest[samples_left - len(fade) :] *= fade[:, None]
        return rest

    def usage(self) -> Usage:
        counted = characters(self.input.prompt)
        return Usage(requests=1, characters=counted, audio_ms=self.output.duration_ms)

    def completed(self) -> Completed:
        """Return the outcome: the audio as one file, the notes as MIDI in another."""
        assert self.writer.head is not None
        notes = write_midi(replace(self.writer.head, bars=tuple(self.writer.bars)))
        score = Medium("audio", blob=1, role="score", content_type=MIDI_TYPE, seed=self.input.seed)
        output: dict[str, Any] = {"media": [self.output.medium(), score]}
        files = (self.output.file(), File(MIDI_TYPE, notes))
        return Completed(self.usage(), output=output, files=files)
