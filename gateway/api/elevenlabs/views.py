"""Models and voices in ElevenLabs' shape, and which models have a voice. Pure.

ElevenLabs' voices have ids of their own. Here voices belong to models, so the id of a catalog voice
is its name, which several models can share; ``default`` is the voice of a model that lists none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NotRequired, TypedDict, cast

from gateway.catalog.availability import availability
from gateway.catalog.listing import price_view
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.catalog.views import PriceLineView
from gateway.tasks.audio import TEXT_MAX
from gateway.voices.store import Recording
from workers.contract.announcements import Announcement

DEFAULT_VOICE: Final = "default"
SPEECH_TASKS: Final[tuple[Task, ...]] = ("text-to-speech", "voice-clone")
MUSIC_TASK: Final[Task] = "text-to-music"


class LanguageView(TypedDict):
    language_id: str
    name: str


class SoundModelView(TypedDict):
    """An audio model."""

    model_id: str
    name: str
    description: str
    can_do_text_to_speech: bool
    can_do_voice_conversion: bool
    can_be_finetuned: bool
    can_use_style: bool
    can_use_speaker_boost: bool
    serves_pro_voices: bool
    requires_alpha_access: bool
    max_characters_request_free_user: int
    max_characters_request_subscribed_user: int
    maximum_text_length_per_request: int
    languages: list[LanguageView]
    tasks: list[str]
    pricing: list[PriceLineView]
    available: bool


class SoundVoiceView(TypedDict):
    """A voice of a model or of the account."""

    voice_id: str
    name: str
    category: str
    samples: None
    labels: dict[str, str]
    description: str | None
    preview_url: str | None
    available_for_tiers: list[str]
    settings: None
    high_quality_base_model_ids: list[str]
    is_owner: bool
    created_at_unix: NotRequired[int]


def supports(entry: CatalogEntry, *tasks: Task) -> bool:
    return any(task in tasks for task in (entry.task, *entry.also))


def has_voice(entry: CatalogEntry, voice_id: str, *, stored: bool) -> bool:
    """Whether a model has a voice or, if ``stored``, can clone the account's voices."""
    if stored:
        return supports(entry, "voice-clone")
    return supports(entry, "text-to-speech") and voice_id in (*entry.known_voices, DEFAULT_VOICE)


def has_unknown_voices(entry: CatalogEntry) -> bool:
    """Whether only the upstream knows the voices of a model."""
    return entry.upstream is not None and not entry.known_voices


def voice_of(entry: CatalogEntry, voice_id: str) -> str | None:
    """Return the voice to submit for an id; None is the model's default."""
    is_own = voice_id == DEFAULT_VOICE and DEFAULT_VOICE not in entry.known_voices
    return None if is_own else voice_id


def models_view(
    entries: Iterable[CatalogEntry], announcements: Sequence[Announcement]
) -> list[SoundModelView]:
    """List all audio models; ``can_do_text_to_speech`` marks those for speech."""
    return [
        _model_view(entry, announcements) for entry in entries if TASKS[entry.task].makes == "audio"
    ]


def _model_view(entry: CatalogEntry, announcements: Sequence[Announcement]) -> SoundModelView:
    longest = entry.limits.characters or TEXT_MAX
    missing = availability(entry, announcements)
    return {
        "model_id": entry.name,
        "name": entry.name,
        "description": entry.description,
        "can_do_text_to_speech": supports(entry, *SPEECH_TASKS),
        "can_do_voice_conversion": False,
        "can_be_finetuned": False,
        "can_use_style": entry.upstream is not None,
        "can_use_speaker_boost": entry.upstream is not None,
        "serves_pro_voices": False,
        "requires_alpha_access": False,
        "max_characters_request_free_user": longest,
        "max_characters_request_subscribed_user": longest,
        "maximum_text_length_per_request": longest,
        "languages": [{"language_id": tag, "name": tag} for tag in entry.known_languages],
        "tasks": [entry.task, *entry.also],
        "pricing": price_view(entry),
        "available": missing is None,
    }


def premade_views(entries: Iterable[CatalogEntry]) -> list[SoundVoiceView]:
    """List the voices of models, each with the models that have it."""
    models: dict[str, list[str]] = {}
    for entry in entries:
        if supports(entry, "text-to-speech"):
            for voice in entry.known_voices or (DEFAULT_VOICE,):
                models.setdefault(voice, []).append(entry.name)
    return [
        _voice_view(voice, voice, "premade", high_quality_base_model_ids=names, is_owner=False)
        for voice, names in models.items()
    ]


def stored_view(voice: Recording, entries: Iterable[CatalogEntry]) -> SoundVoiceView:
    """Return a voice of the account, with the models that can clone it."""
    return _voice_view(
        voice.id,
        voice.name,
        "cloned",
        description=voice.description or None,
        labels={"consent": voice.consent_id or ""},
        created_at_unix=int(voice.created_at.timestamp()),
        high_quality_base_model_ids=[
            entry.name for entry in entries if supports(entry, "voice-clone")
        ],
        is_owner=True,
    )


def _voice_view(id: str, name: str, category: str, **more: Any) -> SoundVoiceView:
    view = {
        "voice_id": id,
        "name": name,
        "category": category,
        "samples": None,
        "labels": {},
        "description": None,
        "preview_url": None,
        "available_for_tiers": [],
        "settings": None,
        **more,
    }
    return cast("SoundVoiceView", view)
