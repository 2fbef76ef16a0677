"""The special tokens of a Whisper checkpoint, as its generation config names them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers.models.whisper.tokenization_whisper import LANGUAGES

TRANSCRIBE: Final = "transcribe"
TRANSLATE: Final = "translate"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of special tokens. Text tokens are below ``end``."""

    start: int
    end: int
    no_timestamps: int | None
    """None for a model without timestamps. Every id above it is a timestamp."""
    previous: int | None
    """Token that introduces a prompt."""
    languages: Mapping[str, int]
    """Ids by ISO 639-1 code. Empty for a model of one language."""
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    initial_timestamp_max: int | None = None
    """Highest first timestamp, in steps of 20 ms."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """``(layer, head)`` of the cross-attention that follows the audio."""
    length_max: int | None = None

    @property
    def timestamp_begin(self) -> int:
        """Id of the timestamp 0.00. Only for a model with timestamps."""
        assert self.no_timestamps is not None
        return self.no_timestamps + 1

    def prefix(self, language: str | None, task: str, *, timestamps: bool) -> list[int]:
        """Return the tokens that every window begins with."""
        found = [self.start]
        if language is not None and self.languages:
            found.append(self.languages[language])
            if task in self.tasks:
                found.append(self.tasks[task])
        if not timestamps and self.no_timestamps is not None:
            found.append(self.no_timestamps)
        return found

    def find_language(self, given: str) -> str | None:
        """Return the code of a language that was given as a tag, such as ``pt-BR``, or by its
        English name; None if the model does not know it."""
        code = given.strip().lower()
        for known in self.languages:
            if known in (code, code.replace("_", "-").partition("-")[0]):
                return known
            if language_name(known) == code:
                return known
        return None


def language_name(code: str) -> str:
    """Return the English name of a language in lower case; an unknown code as it is."""
    return str(LANGUAGES.get(code, code))


def read_special_tokens(config: Any, *, prompt_tokens: Sequence[int | None] = ()) -> SpecialTokens:
    """Read the special tokens from a generation config. Raise ``ValueError`` if one is missing.

    ``prompt_tokens``: candidates for the token before a prompt, if the config does not name it.
    """
    start = getattr(config, "decoder_start_token_id", None)
    end = config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    if start is None or end is None:
        raise ValueError(
            "generation_config.json has no decoder_start_token_id or eos_token_id; take that of "
            "the model's hub page"
        )
    languages = {
        token.strip("<|>"): int(id)
        for token, id in (getattr(config, "lang_to_id", None) or {}).items()
    }
    previous = getattr(config, "prev_sot_token_id", None)
    if previous is None:
        previous = next((token for token in prompt_tokens if token is not None), None)
    no_timestamps = getattr(config, "no_timestamps_token_id", None)
    heads = getattr(config, "alignment_heads", None) or ()
    return SpecialTokens(
        start=int(start),
        end=int(end),
        no_timestamps=None if no_timestamps is None else int(no_timestamps),
        previous=previous,
        languages=languages,
        tasks={name: int(id) for name, id in (getattr(config, "task_to_id", None) or {}).items()},
        suppressed=tuple(getattr(config, "suppress_tokens", None) or ()),
        suppressed_first=tuple(getattr(config, "begin_suppress_tokens", None) or ()),
        initial_timestamp_max=getattr(config, "max_initial_timestamp_index", None),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
        length_max=getattr(config, "max_length", None),
    )
