"""Orders that name a voice of their account: its recording is attached as if it had come along."""

from __future__ import annotations

from dataclasses import replace

from gateway.files.sources import StoredVoice
from gateway.tasks.prepared import Prepared
from gateway.voices.store import Voices


async def with_recordings(voices: Voices, account_id: int, prepared: Prepared) -> Prepared:
    """Look up the voices among what an order brings. Raise ``NotFound`` for one that the account
    does not keep (any more)."""
    if not any(isinstance(source.given, StoredVoice) for source in prepared.sources):
        return prepared
    sources, asked = [], prepared.input
    for source in prepared.sources:
        if isinstance(kept := source.given, StoredVoice):
            voice = await voices.find(account_id, "voice", kept.voice_id, param=source.param)
            sources.append(replace(source, given=replace(kept, blob=voice.blob)))
            asked = {"transcript": voice.transcript, **asked}
        else:
            sources.append(source)
    return replace(prepared, sources=tuple(sources), input=asked)
