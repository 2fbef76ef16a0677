"""Inputs of speech and music: their schemas, checks and maximum usage. Pure.

The duration of speech is unknown before synthesis, so it is bounded by the length of the text; the
worker stops at the duration that the hold covers. If an entry lists voices or languages, only those
are accepted.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field, StringConstraints

from gateway.catalog.schema import SECONDS_MAX, CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField, StoredVoice
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from gateway.tasks.visual import PROMPT_MAX, SEED_MAX
from gateway.voices.store import is_voice_id
from workers.contract.jobs import Usage
from workers.contract.media import (
    RATE_MAX,
    RATE_MIN,
    SPEED_MAX,
    SPEED_MIN,
    AudioFormat,
    MusicInput,
    SpeechInput,
    characters,
)

TEXT_MAX: Final = 200_000
"""Maximum characters for entries without a limit; a long novel has five times as many."""
SECONDS_AT_LEAST: Final = 15.0
SECONDS_PER_CHARACTER: Final = 1.0
"""Upper bound: slow speech takes a tenth of it, but a digit or symbol can be a long word."""
MUSIC_SECONDS_MAX: Final = 600.0
"""Maximum duration for entries without a limit."""
CLONING: Final[Task] = "voice-clone"


def _voice(value: Any) -> Any:
    """Accept ``{"id": name}`` for a name, as OpenAI's clients may send it."""
    return value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value


_Text: TypeAlias = Annotated[str, StringConstraints(max_length=PROMPT_MAX)]
_Word: TypeAlias = Annotated[str, StringConstraints(max_length=100)]
Voice: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_voice)
]


class AudioTask(StrictModel):
    """Fields common to speech and music."""

    format: AudioFormat | None = None
    sample_rate: Annotated[int, Field(ge=RATE_MIN, le=RATE_MAX)] | None = None
    bitrate: Annotated[int, Field(ge=8_000, le=512_000)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_MAX)] | None = None
    parameters: dict[str, Any] | None = None


class SpeechSettings(AudioTask):
    """Fields of speech, without its text."""

    voice: Voice | None = None
    language: Annotated[str, StringConstraints(min_length=2, max_length=35)] | None = None
    speed: Annotated[float, Field(ge=SPEED_MIN, le=SPEED_MAX)] | None = None
    instructions: _Text | None = None
    recording: SourceField | None = None
    """Recording of the voice to clone."""
    transcript: _Text | None = None


class SpeechTask(SpeechSettings):
    """A text to synthesise."""

    text: Annotated[str, StringConstraints(max_length=TEXT_MAX)]


class MusicTask(AudioTask):
    """A piece of music to generate."""

    prompt: _Text | None = None
    lyrics: _Text | None = None
    key: _Word | None = None
    tempo: Annotated[float, Field(ge=20, le=400)] | None = None
    mood: _Word | None = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None


def choose_audio_task(entry: CatalogEntry, value: SpeechTask | MusicTask) -> Task:
    """Choose the task of an input; if none fits, the entry's own, whose check reports why."""
    tasks = (entry.task, *entry.also)
    if isinstance(value, MusicTask):
        wanted: Task = "text-to-music"
    else:
        wanted = (
            CLONING if value.recording is not None or _stored_voice(value) else "text-to-speech"
        )
    return wanted if wanted in tasks else entry.task


def prepare_speech(entry: CatalogEntry, task: Task, value: SpeechTask, *, prefix: str) -> Prepared:
    """Check speech against a catalog entry and bound its usage."""
    checked = _TaskInput(entry, value, prefix)
    if TASKS[task].makes != "audio" or task == "text-to-music":
        raise checked.misfit(task, "speech")
    if not value.text.strip():
        raise checked.refuse("text", "The text is empty.")
    if value.instructions and checked.local:
        message = f"{entry.name} does not follow instructions; leave them out."
        raise checked.refuse("instructions", message, "unsupported_parameter")
    count = checked.counted("text", value.text, entry.limits.characters or TEXT_MAX)
    speed = value.speed or 1.0
    voice, recording = choose_voice(entry, task, value, prefix=prefix)
    speech = SpeechInput(
        text=value.text,
        voice=voice,
        language=checked.language(value.language),
        instructions=value.instructions or "",
        recording=bool(recording),
        transcript=value.transcript or "",
        **checked.common(),
    )
    if value.speed is not None:
        # Omitted by default: not every model of an upstream accepts it.
        speech = msgspec.structs.replace(speech, speed=value.speed)
    seconds = (SECONDS_AT_LEAST + count * SECONDS_PER_CHARACTER) / speed
    return Prepared(
        input=msgspec.to_builtins(speech),
        limits=_limits(entry, min(seconds, entry.limits.seconds or SECONDS_MAX), count),
        sources=recording,
    )


def choose_voice(
    entry: CatalogEntry, task: Task, value: SpeechTask, *, prefix: str
) -> tuple[str, tuple[Source, ...]]:
    """Return the voice's name, or the recording to attach. Only this function decides which.

    Raise ``InvalidRequest``.
    """
    checked = _TaskInput(entry, value, prefix)
    if (stored := _stored_voice(value)) is not None and value.recording is None:
        if task != CLONING:
            message = f"{entry.name} does not support stored voices, only its own."
            raise checked.refuse("voice", message)
        return "", (Source("audio", stored, f"{prefix}voice"),)
    if value.recording is None:
        if value.transcript is not None:
            raise checked.refuse("transcript", "transcript requires a recording; send one.")
        if task == CLONING and checked.local:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{task} clones the voice of a recording; send {prefix}recording.",
                param=f"{prefix}recording",
            )
        known = entry.known_voices
        if value.voice is not None and value.voice not in known and (known or checked.local):
            can = f"its voices are {', '.join(known)}" if known else "it has one; leave it out"
            raise checked.refuse("voice", f"{entry.name} has no voice {value.voice!r}; {can}.")
        return value.voice or "", ()
    if task != CLONING:
        raise checked.refuse("recording", f"{entry.name} cannot clone a voice from a recording.")
    if value.voice is not None:
        raise checked.refuse("voice", "Send either voice or recording.")
    return "", (Source("audio", value.recording, f"{prefix}recording"),)


def _stored_voice(value: SpeechTask) -> StoredVoice | None:
    return (
        StoredVoice(value.voice) if value.voice is not None and is_voice_id(value.voice) else None
    )


def prepare_music(entry: CatalogEntry, task: Task, value: MusicTask, *, prefix: str) -> Prepared:
    """Check music against a catalog entry and bound its usage."""
    checked, limits = _TaskInput(entry, value, prefix), entry.limits
    if task != "text-to-music":
        raise checked.misfit(task, "music")
    if value.lyrics and checked.local:
        message = f"{entry.name} does not sing; leave lyrics out."
        raise checked.refuse("lyrics", message, "unsupported_parameter")
    text = f"{value.prompt or ''}{value.lyrics or ''}"
    if not text.strip() and not value.mood:
        raise InvalidRequest(
            "missing_required_parameter",
            f"{task} needs a text; send {prefix}prompt.",
            param=f"{prefix}prompt",
        )
    count = checked.counted("prompt", text, limits.characters or TEXT_MAX)
    most = limits.seconds or MUSIC_SECONDS_MAX
    if value.seconds is not None and value.seconds > most:
        raise over(f"{prefix}seconds", value.seconds, f"{entry.name} makes at most {most:g} s")
    seconds = value.seconds or entry.default_parameters.seconds
    music = MusicInput(
        prompt=value.prompt or "",
        lyrics=value.lyrics or "",
        key=value.key or "",
        tempo=value.tempo,
        mood=value.mood or "",
        duration_ms=max(1, round(seconds * 1000)) if seconds else None,
        **checked.common(),
    )
    return Prepared(input=msgspec.to_builtins(music), limits=_limits(entry, seconds or most, count))


def _limits(entry: CatalogEntry, seconds: float, count: int) -> Usage:
    return Usage(
        requests=1,
        audio_ms=max(1, round(seconds * 1000)),
        characters=count,
        steps=entry.limits.steps or 0,
        gpu_us=gpu_us_max(entry.limits),
    )


@dataclass(frozen=True, slots=True)
class _TaskInput:
    """An input and the entry that it is checked against."""

    entry: CatalogEntry
    value: AudioTask
    prefix: str

    @property
    def local(self) -> bool:
        return self.entry.upstream is None

    def refuse(self, field: str, message: str, code: str = "invalid_value") -> InvalidRequest:
        return InvalidRequest(code, message, param=f"{self.prefix}{field}")

    def misfit(self, task: Task, what: str) -> InvalidRequest:
        return InvalidRequest(
            "task_not_supported", f"{self.entry.name} does {task}, not {what}.", param="model"
        )

    def common(self) -> dict[str, Any]:
        """Return the fields common to speech and music."""
        value, name = self.value, self.entry.name
        parameters = value.parameters or {}
        if parameters and self.local:
            raise self.refuse(
                f"parameters.{min(parameters)}",
                f"{name} runs here and accepts only the task's own parameters; "
                "parameters is for models of an upstream.",
                "unsupported_parameter",
            )
        seed = value.seed
        if seed is None:
            # Chosen here and not by the worker, so that a second attempt repeats the first. An
            # upstream is called once, and not every model there accepts a seed.
            seed = secrets.randbits(32) if self.local else 0
        return {
            "format": value.format or "mp3",
            "sample_rate": value.sample_rate,
            "bitrate": value.bitrate,
            "seed": seed,
            "parameters": parameters,
        }

    def counted(self, field: str, text: str, most: int) -> int:
        count = characters(text)
        if count > most:
            raise over(f"{self.prefix}{field}", count, f"{self.entry.name} reads {most} characters")
        return count

    def language(self, tag: str | None) -> str:
        known = self.entry.known_languages
        if tag and known and not _speaks(known, tag):
            raise self.refuse(
                "language",
                f"{self.entry.name} does not support {tag!r}; its languages are "
                f"{', '.join(known)}.",
            )
        return tag or ""


def _speaks(known: Collection[str], tag: str) -> bool:
    """Whether a language is supported; regional variants count as their language."""
    return _base(tag) in map(_base, known)


def _base(tag: str) -> str:
    return tag.replace("_", "-").partition("-")[0].lower()
