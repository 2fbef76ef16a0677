"""Attaches the recordings of stored voices that a submission names, as if it had brought them."""

from __future__ import annotations

from dataclasses import replace

from gateway.files.sources import StoredVoice
from gateway.tasks.prepared import Prepared
from gateway.voices.store import Voices


async def with_recordings(voices: Voices, account_id: int, prepared: Prepared) -> Prepared:
    """Replace each stored voice among the attachments by its recording. Raise ``NotFound`` if the
    account has no such voice."""
    sources, asked = [], prepared.input
    for source in prepared.sources:
        if isinstance(kept := source.given, StoredVoice):
            voice = await voices.find(account_id, "voice", kept.voice_id, param=source.param)
            sources.append(replace(source, given=replace(kept, blob=voice.blob)))
            asked = {"transcript": voice.transcript, **asked}
        else:
            sources.append(source)
    return replace(prepared, sources=tuple(sources), input=asked)
