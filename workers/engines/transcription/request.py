"""State of one transcription: its features, the window being decoded, and the text so far.

The recording is read window by window: the next one begins where the last complete segment ended.
Text is emitted once no later token can change it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from workers.contract.jobs import Choice, Completed, RequestId, Tokens, Usage
from workers.contract.media import (
    TranscribedSegment,
    TranscribedWord,
    Transcript,
    TranscriptionInput,
)
from workers.engines.llm.text import TextStream
from workers.engines.transcription.checkpoint import Transcriber
from workers.engines.transcription.constraints import FRAME_S, divide, is_closed
from workers.engines.transcription.special_tokens import language_name
from workers.engines.transcription.words import Word, to_words, token_times
from workers.protocol.engine import CancelReason

_FRAME_MS: Final = round(FRAME_S * 1000)
_WINDOWS_PER_S: Final = 2
"""Windows per second of audio beyond which windows no longer overlap, so that a model whose
timestamps hardly advance ends."""


@dataclass(slots=True, eq=False)
class Decoding:
    """The window that is being decoded: its first frame, its prefix and the tokens after it."""

    row: int
    seek: int
    frames: int
    prefix: list[int]
    length_max: int
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    no_speech: float = 0.0
    pushed: int = 0
    """Number of tokens whose text is final."""


@dataclass(slots=True, eq=False)
class TranscriptionRequest:
    request_id: RequestId
    input: TranscriptionInput
    transcriber: Transcriber
    features: torch.Tensor
    frames: int
    """Number of frames of the features that are audio."""
    duration_ms: int
    language: str | None
    """Code of the language; None until it is detected, or for a model of one language."""
    prompt: list[int]
    timestamps: bool
    generator: torch.Generator
    cancelled: CancelReason | None = None
    window: Decoding | None = None
    seek: int = 0
    windows: int = 0
    text: str = ""
    heard_ms: int = 0
    """Duration of the audio whose text has been emitted."""
    output_tokens: int = 0
    segments: list[TranscribedSegment] = field(default_factory=list)
    words: list[TranscribedWord] = field(default_factory=list)
    _stream: TextStream | None = None
    _new_text: str = ""
    _new_tokens: int = 0

    @property
    def done(self) -> bool:
        return self.seek >= self.frames

    def begin(self, row: int) -> None:
        """Begin the next window, which was encoded into a row. Its prefix follows."""
        network = self.transcriber.network
        frames = min(network.frames, self.frames - self.seek)
        self.window = Decoding(row, self.seek, frames, [], network.positions)
        self.windows += 1

    def set_prefix(self) -> list[int]:
        """Set the window's prefix, once the language is known, and return it."""
        window, special = self.window, self.transcriber.special
        assert window is not None
        task = "translate" if self.input.translate else "transcribe"
        prefix = special.prefix(self.language, task, timestamps=self.timestamps)
        if self.prompt and self.seek == 0:
            assert special.previous is not None
            prefix = [special.previous, *self.prompt, *prefix]
        window.prefix = prefix
        positions = self.transcriber.network.positions
        initial = min(positions // 2 - 1, len(prefix))
        window.length_max = min(positions, (special.length_max or positions) + initial)
        return prefix

    def choose(self, scores: torch.Tensor) -> int:
        """Choose the next token by its scores ``(vocabulary,)``."""
        assert self.window is not None
        if self.input.temperature:
            # On the CPU, so that a seed gives the same text on any device.
            spread = (scores.cpu() / self.input.temperature).softmax(-1)
            token = int(torch.multinomial(spread, 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        self.window.logprob += float(scores[token] - scores.logsumexp(-1))
        return token

    def append(self, token: int) -> bool:
        """Add a token to the window. Return whether the window has ended with it."""
        window, special = self.window, self.transcriber.special
        assert window is not None
        if token == special.end:
            return True
        window.tokens.append(token)
        if not self.timestamps:
            self._push(len(window.tokens))
        elif is_closed(window.tokens, special.timestamp_begin):
            self._push(len(window.tokens) - 1)
        return len(window.prefix) + len(window.tokens) >= window.length_max

    def end_window(self) -> None:
        """Store the window's segments and move to the next window."""
        window, special = self.window, self.transcriber.special
        assert window is not None
        parts, advance = divide(window.tokens, window.frames, special, timestamps=self.timestamps)
        self._push(parts[-1].stop)
        self._flush()
        times: list[float] = []
        if "word" in self.input.timestamps:
            attention = self.transcriber.network.attend(
                window.row, [*window.prefix, *window.tokens], special.alignment_heads
            )[:, len(window.prefix) :]
            times = token_times(
                attention, max(1, window.frames // 2), self.transcriber.network.median_width
            )
        for part in parts:
            span = slice(part.first, part.stop)
            tokens = window.tokens[span]
            text = [place for place in range(part.first, part.stop) if self._is_text(place)]
            if not text:
                continue
            self._add_segment(window, tokens, part.start_s, part.end_s)
            if times:
                ids = [window.tokens[place] for place in text]
                spoken = to_words(
                    ids, [times[place] for place in text], part.end_s, self.transcriber.decode
                )
                self.words.extend(map(self._absolute, spoken))
        if self.windows > _WINDOWS_PER_S * (self.duration_ms // 1000 + 1):
            advance = window.frames
        self.seek += max(1, advance)
        self.heard_ms = min(self.duration_ms, self.seek * _FRAME_MS)
        self.window = None

    def take_event(self) -> Tokens | None:
        """Return the text that is new since the last call, with the usage so far."""
        if not self._new_text:
            return None
        text, count = self._new_text, max(1, self._new_tokens)
        self._new_text, self._new_tokens = "", 0
        if self.window is not None:
            # Text of a window is charged with the whole window, which was encoded for it.
            end = (self.window.seek + self.window.frames) * _FRAME_MS
            self.heard_ms = max(self.heard_ms, min(self.duration_ms, end))
        return Tokens(0, text, count, usage=self.usage())

    def usage(self) -> Usage:
        return Usage(requests=1, audio_ms=self.heard_ms, output_tokens=self.output_tokens)

    def completed(self) -> Completed:
        transcript = Transcript(
            language=language_name(self.language) if self.language else "",
            duration_ms=self.duration_ms,
            segments=tuple(self.segments),
            words=tuple(self.words),
        )
        self.heard_ms = self.duration_ms
        output: dict[str, Any] = msgspec.to_builtins(
            {"choices": [Choice(0, self.text, "stop")], "transcript": transcript}
        )
        return Completed(self.usage(), output=output)

    def _is_text(self, place: int) -> bool:
        assert self.window is not None
        return self.window.tokens[place] < self.transcriber.special.end

    def _push(self, stop: int) -> None:
        """Emit the text of the window's tokens up to one of them."""
        window = self.window
        assert window is not None
        if self._stream is None:
            self._stream = TextStream(self.transcriber.decode, ())
        for place in range(window.pushed, stop):
            if self._is_text(place):
                self._emit(self._stream.push(window.tokens[place]), count=1)
        window.pushed = max(window.pushed, stop)

    def _flush(self) -> None:
        if self._stream is not None:
            self._emit(self._stream.flush(), count=0)
        self._stream = None

    def _emit(self, text: str, *, count: int) -> None:
        text = text if self.text else text.lstrip()
        self.text += text
        self._new_text += text
        self._new_tokens += count
        self.output_tokens += count

    def _add_segment(
        self, window: Decoding, tokens: Sequence[int], start_s: float, end_s: float
    ) -> None:
        text = self.transcriber.decode([t for t in tokens if t < self.transcriber.special.end])
        offset = window.seek * _FRAME_MS
        start_ms = min(self.duration_ms, offset + round(start_s * 1000))
        encoded = text.encode()
        self.segments.append(
            TranscribedSegment(
                start_ms=start_ms,
                end_ms=max(start_ms, min(self.duration_ms, offset + round(end_s * 1000))),
                text=text,
                tokens=tuple(tokens),
                seek=window.seek,
                avg_logprob=window.logprob / (len(window.tokens) + 1),
                compression_ratio=len(encoded) / len(zlib.compress(encoded)) if encoded else 0.0,
                no_speech_prob=window.no_speech,
            )
        )

    def _absolute(self, word: Word) -> TranscribedWord:
        assert self.window is not None
        offset = self.window.seek * _FRAME_MS
        start = min(self.duration_ms, offset + round(word.start_s * 1000))
        end = min(self.duration_ms, offset + round(word.end_s * 1000))
        return TranscribedWord(word.text, start, max(start, end))
