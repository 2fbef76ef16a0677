"""Loads a Whisper checkpoint, and computes the features of recordings.

Every problem of a checkpoint is a ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from workers.contract.models import ModelSpec
from workers.engines.checkpoints import (
    check_family,
    checkpoint_path,
    read_architecture,
    read_model,
    read_tokenizer,
)
from workers.engines.transcription.network import WhisperNetwork
from workers.engines.transcription.options import Options
from workers.engines.transcription.special_tokens import SpecialTokens, read_special_tokens
from workers.media.pixels import Audio

FAMILY: Final = "WhisperForConditionalGeneration"
_ALTERNATIVE: Final = "serve it elsewhere and point an `upstream` entry at it"


class CheckpointLayout:
    """What a checkpoint says of its model beside the weights."""

    def __init__(self, spec: ModelSpec) -> None:
        self.path = checkpoint_path(spec)
        _, family = read_architecture(self.path)
        check_family(family, (FAMILY,), _ALTERNATIVE)
        self.extractor: Any = _read(WhisperFeatureExtractor, self.path, "preprocessor_config.json")
        self.tokenizer: Any = read_tokenizer(self.path)
        generation = _read(GenerationConfig, self.path, "generation_config.json")
        self.special = read_special_tokens(
            generation, prompt_tokens=[self._id("<|startofprev|>"), self._id("<|startoflm|>")]
        )
        config: Any = WhisperConfig.from_pretrained(self.path, local_files_only=True)
        frames = 2 * int(config.max_source_positions)
        if self.extractor.n_samples // self.extractor.hop_length != frames:
            raise ValueError(
                f"preprocessor_config.json makes windows of {self.extractor.chunk_length} s, but "
                f"config.json has {frames} frames"
            )
        if self.extractor.feature_size != config.num_mel_bins:
            raise ValueError(
                f"preprocessor_config.json makes {self.extractor.feature_size} mel bands, but "
                f"config.json has {config.num_mel_bins}"
            )

    def _id(self, token: str) -> int | None:
        found = self.tokenizer.get_vocab().get(token)
        return None if found is None else int(found)


class Transcriber:
    """A loaded model, with its tokenizer and its feature extractor."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        layout = CheckpointLayout(spec)
        self.special: SpecialTokens = layout.special
        self._extractor = layout.extractor
        self._tokenizer = layout.tokenizer
        # The output layer is the embedding itself, which checkpoints store once.
        model = read_model(WhisperForConditionalGeneration, layout.path, options, unused="proj_out")
        self.network = WhisperNetwork(model, options.slots)
        self.rate = int(self._extractor.sampling_rate)

    def features(self, audio: Audio) -> tuple[torch.Tensor, int]:
        """Return the features of a recording ``(mel, frames)``, float32, and the number of frames
        that are audio. A recording of at most one window is padded to a whole one."""
        samples = audio.samples[0]
        extractor = self._extractor
        is_short = len(samples) <= extractor.n_samples
        found = extractor(
            samples,
            sampling_rate=self.rate,
            return_tensors="pt",
            truncation=False,
            padding="max_length" if is_short else "longest",
        )
        features: torch.Tensor = found.input_features[0]
        frames = -(-len(samples) // int(extractor.hop_length))
        return features, min(max(frames, 1), features.shape[-1])

    def window(self, features: torch.Tensor, seek: int) -> torch.Tensor:
        """Cut the window of the features that begins at a frame."""
        cut = features[:, seek : seek + self.network.frames]
        missing = self.network.frames - cut.shape[-1]
        return torch.nn.functional.pad(cut, (0, missing)) if missing else cut

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, without special ones."""
        found: list[int] = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False)
        return [token for token in found if token < self.special.end]

    def decode(self, tokens: Any) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def _read(kind: Any, path: Path, name: str) -> Any:
    if not (path / name).is_file():
        raise ValueError(f"the checkpoint has no {name}; copy it from the model's hub page")
    try:
        return kind.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path / name} cannot be read: {error}") from error
