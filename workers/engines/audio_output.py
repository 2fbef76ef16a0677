"""The sound of one request: what has been heard so far, the stream made of it, and the file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.contract.jobs import AUDIO_CHUNK_BYTES_MAX, AudioChunk, Event
from workers.contract.media import File, Medium, MusicInput, SpeechInput
from workers.media.audio import AUDIO_TYPES, AudioWriter, encode_audio, encoded_rate
from workers.media.encode import Origin
from workers.media.pixels import Audio


class AudioOutput:
    """Samples at ``rate`` Hz, delivered as they are ``asked`` for; with ``stream`` somebody hears
    them as they come."""

    def __init__(
        self,
        asked: SpeechInput | MusicInput,
        origin: Origin,
        *,
        rate: int,
        stream: bool,
        channels: int = 1,
    ) -> None:
        self.samples = 0
        self.characters = 0
        """Characters of the text that what was added so far has taken, to be sent along."""
        self._asked = asked
        self._origin = origin
        self._rate = rate
        self._parts: list[npt.NDArray[np.float32]] = []
        self._sent = 0
        self._writer: AudioWriter | None = None
        if stream:
            self._writer = AudioWriter(
                asked.format,
                source_rate=rate,
                channels=channels,
                rate=asked.sample_rate,
                bitrate=asked.bitrate,
                origin=origin,
            )

    @property
    def duration_ms(self) -> int:
        return round(self.samples * 1000 / self._rate)

    def add(self, sound: npt.NDArray[np.float32]) -> list[Event]:
        """Let ``(samples,)`` or ``(samples, channels)`` be heard."""
        self._parts.append(sound)
        self.samples += len(sound)
        if self._writer is not None:
            return self._pieces(self._writer.add(sound.T))
        return [AudioChunk(0, 0, b"", self.duration_ms)]

    def finish(self) -> list[Event]:
        """End the stream; nothing can be added after it."""
        return [] if self._writer is None else self._pieces(self._writer.finish())

    def file(self) -> File:
        """The whole, of which there must be something."""
        asked = self._asked
        data = encode_audio(
            Audio(np.atleast_2d(np.concatenate(self._parts).T), self._rate),
            asked.format,
            rate=asked.sample_rate,
            bitrate=asked.bitrate,
            origin=self._origin,
        )
        return File(AUDIO_TYPES[asked.format], data)

    def medium(self, *, cut: bool = False) -> Medium:
        """What is said of the file, which is the first of its request."""
        asked = self._asked
        return Medium(
            "audio",
            blob=0,
            content_type=AUDIO_TYPES[asked.format],
            duration_ms=self.duration_ms,
            sample_rate=encoded_rate(asked.format, asked.sample_rate or self._rate),
            seed=asked.seed,
            cut=cut,
        )

    def _pieces(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        for at in range(0, len(data), AUDIO_CHUNK_BYTES_MAX):
            piece = data[at : at + AUDIO_CHUNK_BYTES_MAX]
            events.append(AudioChunk(0, self._sent, piece, self.duration_ms, self.characters))
            self._sent += len(piece)
        return events
