"""The interface between the engine and a family of checkpoints, and its voices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from workers.engines.speech.codec import EmitAudio
from workers.engines.speech.manner import Manner
from workers.engines.speech.mel_statistics import MelStatistics
from workers.engines.speech.options import Options, VoiceOptions
from workers.engines.speech.token_loop import TokenLoop
from workers.media.pixels import MediaError
from workers.media.recordings import read_audio

_RECORDING_S_MIN: Final = 0.3
"""Minimum length of a recording of a voice."""

Mono: TypeAlias = npt.NDArray[np.float32]
"""``(N,)``, from -1 to 1."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice in memory: what an entry or a request names, loaded and checked."""

    name: str = ""
    speaker: int | None = None
    embedding: torch.Tensor | None = None
    """``(D,)`` float32, on the CPU."""
    preset: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    recording: Mono | None = None
    """Audio at the family's ``recording_rate``."""
    transcript: str = ""
    statistics: MelStatistics | None = None
    """Mel statistics of a recording, for a voice that was embedded from one."""
    manner: Manner | None = None
    """Manner of such a recording."""
    speed: float = 1.0
    """Factor of the model's usual speed at which such a recording is spoken."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sentence, or one piece of music."""

    text: str
    voice: Voice
    seconds: float
    """Maximum duration of its audio."""
    speed: float = 1.0
    """Always 1, unless the family has ``has_speed``."""
    seed: int = 0
    """Seed of its random numbers, unsigned, 64 bits."""


class SpeechModel(Protocol):
    """A checkpoint in memory.

    Several calls of ``synthesize`` can be in progress: each can be suspended where a module of
    ``steps`` is called.
    """

    rate: int
    """Sample rate of the audio, in Hz."""
    module: torch.nn.Module
    steps: Sequence[torch.nn.Module]
    has_speed: bool
    recording_rate: int | None
    """Sample rate of recordings in Hz; None: voices from recordings are not supported."""

    @property
    def loop(self) -> TokenLoop | None:
        """What generates the tokens of all segments together, if the family does so."""
        ...

    def check(self, voice: Voice) -> Voice:
        """Prepare a voice for synthesis. Raise ``ValueError`` if it cannot be used."""
        ...

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None: ...


def read_voice(
    name: str, options: VoiceOptions, *, root: Path, rate: int | None, limits: Options
) -> Voice:
    """Load the voice of a catalog entry. Raise ``ValueError`` with the reason if that fails."""
    try:
        return Voice(
            name,
            options.speaker,
            None if options.embedding is None else _vector(root / options.embedding),
            {} if options.preset is None else _arrays(root, options.preset),
            None
            if options.recording is None
            else read_recording((root / options.recording).read_bytes(), rate, limits),
            options.transcript,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the voice {name!r} cannot be read: {error}") from error


def read_recording(data: bytes, rate: int | None, options: Options) -> Mono:
    """Decode a recording of a voice. Raise ``MediaError``."""
    if rate is None:
        raise MediaError("This model does not support voices from recordings.")
    audio = read_audio(data, rate=rate, seconds_max=options.recording_seconds)
    if audio.seconds < _RECORDING_S_MIN:
        raise MediaError(
            f"The recording is {audio.seconds:.2f} seconds long; it must be at least "
            f"{_RECORDING_S_MIN:g}, and several seconds are better."
        )
    return np.ascontiguousarray(audio.samples[0])


def _vector(path: Path) -> torch.Tensor:
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        if len(tensors) != 1:
            raise ValueError(f"{path.name} has {len(tensors)} tensors; it must have one")
        tensor = next(iter(tensors.values()))
    else:
        tensor = torch.from_numpy(np.load(path, allow_pickle=False))
    return tensor.reshape(-1).float()


def _arrays(root: Path, preset: str) -> dict[str, npt.NDArray[Any]]:
    """Load arrays from an ``.npz``, or by a name in a Bark checkpoint's list of files."""
    index = root / "speaker_embeddings_path.json"
    if (root / preset).is_file() or not index.is_file():
        with np.load(root / preset, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    files = json.loads(index.read_text())[preset]
    return {name: np.load(root / file, allow_pickle=False) for name, file in files.items()}
