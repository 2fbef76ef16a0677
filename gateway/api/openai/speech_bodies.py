"""The body of OpenAI's speech, and its translation to a task's input. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, StringConstraints

from gateway.api.http.fields import ModelName
from gateway.tasks.audio import TEXT_MAX, SpeechSettings, SpeechTask
from workers.contract.media import AudioFormat

PCM_RATE: Final = 24_000
"""Sample rate of raw PCM in Hz, which OpenAI's clients assume."""
DEFAULT_VOICE: Final = "default"
"""Name for the voice of a model with only one, because OpenAI's clients must send a voice."""
NAMES: Final[Mapping[str, str]] = {"text": "input", "format": "response_format"}
"""OpenAI's names of our fields, for error messages."""


class SpeechBody(SpeechSettings):
    """Body of ``POST /v1/audio/speech``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "pocket-speech", "input": "Good morning.", "voice": DEFAULT_VOICE}
            ]
        },
    )

    model: ModelName
    input: Annotated[str, StringConstraints(max_length=TEXT_MAX)]
    response_format: AudioFormat | None = None
    stream_format: Literal["audio", "sse"] | None = None

    @property
    def wanted(self) -> AudioFormat:
        return self.response_format or self.format or "mp3"

    def speech(self) -> SpeechTask:
        """Return the task's input."""
        given: dict[str, Any] = {name: getattr(self, name) for name in SpeechSettings.model_fields}
        given |= {"text": self.input, "format": self.wanted}
        if self.voice == DEFAULT_VOICE:
            given["voice"] = None
        if self.wanted == "pcm" and self.sample_rate is None:
            given["sample_rate"] = PCM_RATE
        return SpeechTask.model_construct(**given)
