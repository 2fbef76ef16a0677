"""Bodies of ElevenLabs' calls, and their translation to a task's input. Pure.

Settings that only ElevenLabs' models have, such as stability and similarity, are passed to upstream
models under their own names and have no effect on models that run here. Options that would change
the audio, but are not supported, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)

from gateway.api.http.fields import ModelName
from gateway.catalog.schema import CatalogEntry
from gateway.checks.decoding import decode_json
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest, rename
from gateway.files.sources import SentSource
from gateway.tasks.audio import MusicTask, SpeechTask
from gateway.tasks.contracts import without_unknown
from gateway.tasks.mistakes import invalid_field
from workers.contract.media import AudioFormat

_HZ: Final = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_KBPS: Final = (32, 64, 96, 128, 192)
_FORMATS: Final[tuple[tuple[AudioFormat, tuple[int, ...], tuple[int, ...]], ...]] = (
    ("mp3", (22_050,), (32,)),
    ("mp3", (24_000,), (48,)),
    ("mp3", (44_100,), _KBPS),
    ("mp3", (48_000,), (128, 192, 240, 320)),
    ("opus", (48_000,), _KBPS),
    ("pcm", _HZ, ()),
    ("wav", _HZ, ()),
    ("ulaw", (8_000,), ()),
    ("alaw", (8_000,), ()),
)
"""Formats with their sample rates in Hz and, if lossy, their bit rates in kbit/s."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A parsed output format such as ``mp3_44100_128``."""

    format: AudioFormat
    sample_rate: int
    bitrate: int | None = None


FORMATS: Final[Mapping[str, OutputFormat]] = {
    **{
        f"{kind}_{hz}_{kbps}": OutputFormat(kind, hz, kbps * 1000)
        for kind, rates, bitrates in _FORMATS
        for hz in rates
        for kbps in bitrates
    },
    **{
        f"{kind}_{hz}": OutputFormat(kind, hz)
        for kind, rates, bitrates in _FORMATS
        for hz in rates
        if not bitrates
    },
}


def read_format(name: str | None) -> OutputFormat:
    """Look up an output format. Raise ``InvalidRequest`` if it is unknown."""
    name = "mp3_44100_128" if name in (None, "auto") else name
    if name not in FORMATS:
        raise InvalidRequest(
            "invalid_output_format",
            f"output_format is {name!r}; accepted: {', '.join(sorted(FORMATS))}.",
            param="output_format",
        )
    return FORMATS[name]


def _labels(value: Any) -> Any:
    """Decode labels, which clients send as JSON in a form field."""
    try:
        return decode_json(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


class _Body(StrictModel):
    names: ClassVar[Mapping[str, str]]
    """ElevenLabs' names of our fields, for error messages."""

    model_id: ModelName | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None


_FILES: Final = {"type": "array", "items": {"type": "string", "format": "binary"}}


class AddedBody(StrictModel):
    """Body of ``POST …/v1/voices/add``, a form."""

    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    description: str | None = None
    labels: Annotated[dict[str, str] | None, BeforeValidator(_labels)] = None
    files: Annotated[list[InstanceOf[SentSource]], WithJsonSchema(_FILES)]
    remove_background_noise: Literal[False] | None = None


class VoiceSettings(StrictModel):
    speed: float | None = None
    stability: Annotated[float, Field(ge=0, le=1)] | None = None
    similarity_boost: Annotated[float, Field(ge=0, le=1)] | None = None
    style: Annotated[float, Field(ge=0, le=1)] | None = None
    use_speaker_boost: bool | None = None
    clone_strength: Annotated[float, Field(ge=0, le=1)] | None = None

    def upstream_settings(self) -> dict[str, Any]:
        """Return the settings that only upstream models have."""
        return self.model_dump(exclude_none=True, exclude={"speed"})


class SpokenBody(_Body):
    """Body of ``POST …/v1/text-to-speech/{voice_id}``."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Good morning."}]})

    names = {"voice": "voice_id", "language": "language_code", "speed": "voice_settings.speed"}

    text: str
    language_code: str | None = None
    voice_settings: VoiceSettings | None = None

    # Accepted without effect: models here synthesise sentence by sentence, without context.
    previous_text: str | None = None
    next_text: str | None = None
    previous_request_ids: Annotated[list[str], Field(max_length=3)] | None = None
    next_request_ids: Annotated[list[str], Field(max_length=3)] | None = None
    use_pvc_as_ivc: bool | None = None

    # Text normalisation is configured in the catalog; only its default is accepted here.
    apply_text_normalization: Literal["auto", "on"] | None = None
    apply_language_text_normalization: Literal[False] | None = None
    pronunciation_dictionary_locators: Annotated[list[Any], Field(max_length=0)] | None = None
    audio_effects: None = None

    def speech_task(
        self, entry: CatalogEntry, voice: str | None, output: OutputFormat
    ) -> SpeechTask:
        settings = self.voice_settings or VoiceSettings()
        passed_on = without_unknown(entry, settings.upstream_settings())
        return _checked(
            SpeechTask,
            self.names,
            text=self.text,
            voice=voice,
            language=self.language_code,
            speed=settings.speed,
            seed=self.seed,
            format=output.format,
            sample_rate=output.sample_rate,
            bitrate=output.bitrate,
            parameters=passed_on if entry.upstream is not None else None,
        )


class ComposedBody(_Body):
    """Body of ``POST …/v1/music``."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "a slow waltz", "music_length_ms": 10_000}]},
    )

    names = {"seconds": "music_length_ms"}

    prompt: str
    music_length_ms: Annotated[int, Field(ge=3_000, le=600_000)] | None = None
    force_instrumental: bool | None = None

    respect_sections_durations: bool | None = None
    composition_plan: None = None
    finetune_id: None = None
    store_for_inpainting: Literal[False] | None = None
    sign_with_c2pa: Literal[False] | None = None

    def music_task(self, entry: CatalogEntry, output: OutputFormat) -> MusicTask:
        # Models that run here sing only if there are lyrics, which this call does not have.
        passed_on = entry.upstream is not None and self.force_instrumental is not None
        return _checked(
            MusicTask,
            self.names,
            prompt=self.prompt,
            seconds=self.music_length_ms / 1000 if self.music_length_ms else None,
            seed=self.seed,
            format=output.format,
            sample_rate=output.sample_rate,
            bitrate=output.bitrate,
            parameters={"force_instrumental": self.force_instrumental} if passed_on else None,
        )


Task = TypeVar("Task", SpeechTask, MusicTask)


def _checked(schema: type[Task], names: Mapping[str, str], **given: Any) -> Task:
    try:
        return schema.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        wrong = invalid_field(error.errors(include_url=False))
        rename(wrong, names)
        raise wrong from None
