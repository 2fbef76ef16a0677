"""What a client may send to be spoken or played, and the most that it can use. Pure.

Length is not known before a text is spoken, so it is bounded by the text: what is held for is what
a worker stops at, however slowly the model speaks. What an entry lists (voices, languages) is all
that can be had of it.
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
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField, StoredVoice
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from gateway.tasks.text import Strict
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
"""Of an entry that has no limit of its own; a long novel has some five times as many."""
SECONDS_AT_LEAST: Final = 15.0
SECONDS_PER_CHARACTER: Final = 1.0
"""A patient reader takes a tenth of it, but a numeral or a sign can be a long word."""
MUSIC_SECONDS_MAX: Final = 600.0
"""Of an entry that has no limit of its own."""
CLONING: Final[Task] = "voice-clone"


def _voice(value: Any) -> Any:
    """OpenAI's clients may send ``{"id": name}`` in the place of a name."""
    return value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value


_Text: TypeAlias = Annotated[str, StringConstraints(max_length=PROMPT_MAX)]
_Word: TypeAlias = Annotated[str, StringConstraints(max_length=100)]
Voice: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_voice)
]


class AudioTask(Strict):
    """What speech and music have in common."""

    format: AudioFormat | None = None
    sample_rate: Annotated[int, Field(ge=RATE_MIN, le=RATE_MAX)] | None = None
    bitrate: Annotated[int, Field(ge=8_000, le=512_000)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_MAX)] | None = None
    parameters: dict[str, Any] | None = None


class SpeechSettings(AudioTask):
    """How a text is to be spoken."""

    voice: Voice | None = None
    language: Annotated[str, StringConstraints(min_length=2, max_length=35)] | None = None
    speed: Annotated[float, Field(ge=SPEED_MIN, le=SPEED_MAX)] | None = None
    instructions: _Text | None = None
    recording: SourceField | None = None
    """Of the voice to speak in."""
    transcript: _Text | None = None


class SpeechTask(SpeechSettings):
    """A text to be spoken."""

    text: Annotated[str, StringConstraints(max_length=TEXT_MAX)]


class MusicTask(AudioTask):
    """A piece of music to be made."""

    prompt: _Text | None = None
    lyrics: _Text | None = None
    key: _Word | None = None
    tempo: Annotated[float, Field(ge=20, le=400)] | None = None
    mood: _Word | None = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None


def choose_audio_task(entry: CatalogEntry, value: SpeechTask | MusicTask) -> Task:
    """Which of a model's tasks an input asks for; where none fits the entry's own, whose check says
    what is wrong."""
    tasks = (entry.task, *entry.also)
    if isinstance(value, MusicTask):
        wanted: Task = "text-to-music"
    else:
        wanted = (
            CLONING if value.recording is not None or _stored_voice(value) else "text-to-speech"
        )
    return wanted if wanted in tasks else entry.task


def prepare_speech(entry: CatalogEntry, task: Task, value: SpeechTask, *, prefix: str) -> Prepared:
    """Check a text to be spoken against a catalog entry and bound what it can use."""
    asked = _TaskInput(entry, value, prefix)
    if TASKS[task].makes != "audio" or task == "text-to-music":
        raise asked.misfit(task, "a text to be spoken")
    if not value.text.strip():
        raise asked.refuse("text", "There is nothing to be said in the text.")
    count = asked.counted("text", value.text, entry.limits.characters or TEXT_MAX)
    speed = value.speed or 1.0
    voice, recording = choose_voice(entry, task, value, prefix=prefix)
    speech = SpeechInput(
        text=value.text,
        voice=voice,
        language=asked.language(value.language),
        instructions=value.instructions or "",
        recording=bool(recording),
        transcript=value.transcript or "",
        **asked.common(),
    )
    if value.speed is not None:
        # Unsaid otherwise, since not every model of an upstream knows of it.
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
    """The voice by its name, or the recording to be attached: the one place where that is decided.

    Raise ``InvalidRequest``.
    """
    asked = _TaskInput(entry, value, prefix)
    if (kept := _stored_voice(value)) is not None and value.recording is None:
        if task != CLONING:
            message = f"{entry.name} does not speak in voices that are kept, only in its own."
            raise asked.refuse("voice", message)
        return "", (Source("audio", kept, f"{prefix}voice"),)
    if value.recording is None:
        if value.transcript is not None:
            raise asked.refuse("transcript", "transcript belongs to a recording; send one.")
        if task == CLONING and asked.local:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{task} speaks in the voice of a recording; send {prefix}recording.",
                param=f"{prefix}recording",
            )
        known = entry.known_voices
        if value.voice is not None and value.voice not in known and (known or asked.local):
            can = f"its voices are {', '.join(known)}" if known else "it has one; leave it out"
            raise asked.refuse("voice", f"{entry.name} has no voice {value.voice!r}; {can}.")
        return value.voice or "", ()
    if task != CLONING:
        raise asked.refuse("recording", f"{entry.name} takes no voice from a recording.")
    if value.voice is not None:
        raise asked.refuse("voice", "Send either voice or recording.")
    return "", (Source("audio", value.recording, f"{prefix}recording"),)


def _stored_voice(value: SpeechTask) -> StoredVoice | None:
    return (
        StoredVoice(value.voice) if value.voice is not None and is_voice_id(value.voice) else None
    )


def prepare_music(entry: CatalogEntry, task: Task, value: MusicTask, *, prefix: str) -> Prepared:
    """Check a piece of music against a catalog entry and bound what it can use."""
    asked, limits = _TaskInput(entry, value, prefix), entry.limits
    if task != "text-to-music":
        raise asked.misfit(task, "music")
    text = f"{value.prompt or ''}{value.lyrics or ''}"
    if not text.strip() and not value.mood:
        raise InvalidRequest(
            "missing_required_parameter",
            f"{task} starts from a text; send {prefix}prompt.",
            param=f"{prefix}prompt",
        )
    count = asked.counted("prompt", text, limits.characters or TEXT_MAX)
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
        **asked.common(),
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
    """An input beside the entry that it is for."""

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
        """The fields that both inputs have."""
        value, name = self.value, self.entry.name
        parameters = value.parameters or {}
        if parameters and self.local:
            raise self.refuse(
                f"parameters.{min(parameters)}",
                f"{name} runs here and knows no other parameters than those of the task; "
                "parameters is for models of an upstream.",
                "unsupported_parameter",
            )
        seed = value.seed
        if seed is None:
            # Chosen here and not by the worker, so that a second attempt repeats the first. An
            # upstream's order is placed once, and not every model there knows of seeds.
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
                f"{self.entry.name} does not speak {tag!r}; it speaks {', '.join(known)}.",
            )
        return tag or ""


def _speaks(known: Collection[str], tag: str) -> bool:
    """Regions of a language are spoken by who speaks the language."""
    return _base(tag) in map(_base, known)


def _base(tag: str) -> str:
    return tag.replace("_", "-").partition("-")[0].lower()
