"""Loads the components of a checkpoint, and checks how a voice is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from workers.engines.speech.model import Voice
from workers.engines.speech.options import Options

_READ_ERRORS: Final = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)


def read_tokenizer(path: Path) -> Any:
    """Raise ``ValueError`` with the reason if it cannot be read."""
    return read_processor(AutoTokenizer, path, "tokenizer")


def read_processor(kind: Any, path: Path, name: str = "processor") -> Any:
    """Raise ``ValueError`` with the reason if it cannot be read."""
    try:
        return kind.from_pretrained(str(path), local_files_only=True)
    except _READ_ERRORS as error:
        raise ValueError(f"its {name} cannot be read: {error}") from error


def read_part(kind: Any, path: Path, options: Options) -> Any:
    """Load a model for inference. Raise ``ValueError`` with the reason if that fails."""
    try:
        model = kind.from_pretrained(
            str(path), dtype=options.torch_dtype, local_files_only=True, use_safetensors=True
        )
    except _READ_ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return model.to(options.torch_device).eval().requires_grad_(requires_grad=False)


def read_vocoder(kind: Any, path: Path, options: Options) -> Any:
    folder = path / (options.vocoder or "vocoder")
    if not folder.is_dir():
        raise ValueError(f"it has no vocoder; {folder} is not a directory")
    return read_part(kind, folder, options)


def check_voice_source(voice: Voice, *kinds: str) -> None:
    """Raise ``ValueError`` if a voice is given by anything but ``kinds``."""
    sources = {
        "speaker": voice.speaker is not None,
        "embedding": voice.embedding is not None,
        "preset": bool(voice.preset),
        "recording": voice.recording is not None,
    }
    for kind, present in sources.items():
        if present and kind not in kinds:
            accepted = " or ".join(kinds) if kinds else "no voices"
            raise ValueError(f"it is given by a {kind}; this model accepts {accepted}")
