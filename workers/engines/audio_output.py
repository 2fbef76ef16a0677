"""The audio of one request: its samples so far, the stream made of them, and the file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.contract.jobs import AUDIO_CHUNK_BYTES_MAX, AudioChunk, Event
from workers.contract.media import File, Medium, MusicInput, SpeechInput
from workers.media.audio import AUDIO_TYPES, AudioWriter, encode_audio, encoded_rate
from workers.media.encode import Origin
from workers.media.pixels import Audio


class AudioOutput:
    """Encodes samples at ``rate`` Hz in the requested format; with ``stream``, as they arrive."""

    def __init__(
        self,
        task_input: SpeechInput | MusicInput,
        origin: Origin,
        *,
        rate: int,
        stream: bool,
        channels: int = 1,
    ) -> None:
        self.samples = 0
        self.characters = 0
        """Characters of the text synthesised so far; sent with each audio chunk."""
        self._input = task_input
        self._origin = origin
        self._rate = rate
        self._parts: list[npt.NDArray[np.float32]] = []
        self._sent = 0
        self._writer: AudioWriter | None = None
        if stream:
            self._writer = AudioWriter(
                task_input.format,
                source_rate=rate,
                channels=channels,
                rate=task_input.sample_rate,
                bitrate=task_input.bitrate,
                origin=origin,
            )

    @property
    def duration_ms(self) -> int:
        return round(self.samples * 1000 / self._rate)

    def add(self, audio: npt.NDArray[np.float32]) -> list[Event]:
        """Append ``(samples,)`` or ``(samples, channels)``; return the events for them."""
        self._parts.append(audio)
        self.samples += len(audio)
        if self._writer is not None:
            return self._chunks(self._writer.add(audio.T))
        return [AudioChunk(0, 0, b"", self.duration_ms)]

    def finish(self) -> list[Event]:
        """End the stream. Nothing can be added afterwards."""
        return [] if self._writer is None else self._chunks(self._writer.finish())

    def file(self) -> File:
        """Encode all audio as one file. Requires at least one ``add``."""
        task_input = self._input
        data = encode_audio(
            Audio(np.atleast_2d(np.concatenate(self._parts).T), self._rate),
            task_input.format,
            rate=task_input.sample_rate,
            bitrate=task_input.bitrate,
            origin=self._origin,
        )
        return File(AUDIO_TYPES[task_input.format], data)

    def medium(self, *, cut: bool = False) -> Medium:
        """Describe the file, which is the first of its request."""
        task_input = self._input
        return Medium(
            "audio",
            blob=0,
            content_type=AUDIO_TYPES[task_input.format],
            duration_ms=self.duration_ms,
            sample_rate=encoded_rate(task_input.format, task_input.sample_rate or self._rate),
            seed=task_input.seed,
            cut=cut,
        )

    def _chunks(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(data), AUDIO_CHUNK_BYTES_MAX):
            chunk = data[start : start + AUDIO_CHUNK_BYTES_MAX]
            events.append(AudioChunk(0, self._sent, chunk, self.duration_ms, self.characters))
            self._sent += len(chunk)
        return events
