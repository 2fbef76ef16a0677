"""Families that draw a whole sentence: VITS, FastSpeech2Conformer and SpeechT5.

None is spoken in padded batches: the decoders of the first two take no mask, so that what is padded
would be heard in the others' last sounds, and so does what smooths SpeechT5's spectrogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerModel,
    FastSpeech2ConformerWithHifiGan,
    SpeechT5ForTextToSpeech,
    SpeechT5HifiGan,
    VitsModel,
)

from workers.engines.speech.options import Options
from workers.engines.speech.talker import Line, Say, Voice


class _Whole:
    channels = 1
    own_speed = False
    recording_rate: int | None = None
    rate: int
    module: torch.nn.Module
    steps: Sequence[torch.nn.Module]

    def __init__(self, path: Path, options: Options) -> None:
        self._device = options.torch_device
        self._tokenizer: Any = read_tokenizer(path)

    def _ids(self, text: str) -> torch.Tensor:
        found: torch.Tensor = self._tokenizer(text, return_tensors="pt")["input_ids"]
        return found.to(self._device)


class VitsTalker(_Whole):
    own_speed = True

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        self._model: Any = read_part(VitsModel, path, options)
        self.module, self.steps = self._model, (self._model,)
        self.rate = self._model.config.sampling_rate
        self._speakers: int = self._model.config.num_speakers
        if getattr(self._tokenizer, "phonemize", False):
            try:
                self._tokenizer("a")
            except ImportError as error:
                raise ValueError(f"the checkpoint reads phonemes: {error}") from error

    def check(self, voice: Voice) -> None:
        _refuse_all_but(voice, "speaker")
        _check_speaker(voice, self._speakers)

    def speak(self, line: Line, say: Say) -> None:
        ids = self._ids(line.text)
        if ids.shape[1] < 2:  # nothing that its alphabet has
            return
        made = self._model(
            input_ids=ids,
            speaker_id=(line.voice.speaker or 0) if self._speakers > 1 else None,
            speaking_rate=self._model.config.speaking_rate * line.speed,
        )
        say(made.waveform[0])


class FastSpeechTalker(_Whole):
    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        if (path / (options.vocoder or "vocoder")).is_dir():
            self._model: Any = read_part(FastSpeech2ConformerModel, path, options)
            self._vocoder: Any = read_vocoder(FastSpeech2ConformerHifiGan, path, options)
            self.module = torch.nn.ModuleList([self._model, self._vocoder])
        else:
            whole: Any = read_part(FastSpeech2ConformerWithHifiGan, path, options)
            self._model, self._vocoder, self.module = whole.model, whole.vocoder, whole
        self.steps = (self._model, self._vocoder)
        self.rate = self._vocoder.config.sampling_rate
        self._speakers: int = self._model.config.num_speakers or 1
        self._width: int | None = self._model.config.speaker_embed_dim

    def check(self, voice: Voice) -> None:
        _refuse_all_but(voice, "speaker", "embedding")
        _check_speaker(voice, self._speakers)
        if voice.embedding is not None:
            _check_width(voice, self._width)

    def speak(self, line: Line, say: Say) -> None:
        voice, given = line.voice, {}
        if self._speakers > 1:
            given["speaker_ids"] = torch.tensor([[voice.speaker or 0]], device=self._device)
        if voice.embedding is not None:
            given["speaker_embedding"] = voice.embedding[None].to(self._device, self._model.dtype)
        made = self._model(self._ids(line.text), return_dict=True, **given)
        say(self._vocoder(made.spectrogram)[0])


class SpeechT5Talker(_Whole):
    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        self._model: Any = read_part(SpeechT5ForTextToSpeech, path, options)
        self._vocoder: Any = read_vocoder(SpeechT5HifiGan, path, options)
        self.module = torch.nn.ModuleList([self._model, self._vocoder])
        self.steps = (self._model.speecht5.decoder.wrapped_decoder, self._vocoder)
        self.rate = self._vocoder.config.sampling_rate
        config = self._vocoder.config
        samples = self._model.config.reduction_factor
        for factor in config.upsample_rates:
            samples *= factor
        self._steps_a_second = self.rate / samples
        if not options.voices:
            raise ValueError("SpeechT5 speaks in no voice of its own; the entry needs voices")

    def check(self, voice: Voice) -> None:
        _refuse_all_but(voice, "embedding")
        if voice.embedding is None:
            raise ValueError("it needs an embedding")
        _check_width(voice, self._model.config.speaker_embedding_dim)

    def speak(self, line: Line, say: Say) -> None:
        assert line.voice.embedding is not None
        ids = self._ids(line.text)
        reduction = self._model.config.reduction_factor
        most = line.seconds * self._steps_a_second * reduction / ids.shape[1]
        embedding = line.voice.embedding[None].to(self._device, self._model.dtype)
        say(
            self._model.generate_speech(
                ids, embedding, vocoder=self._vocoder, maxlenratio=min(20.0, most)
            )
        )


def read_tokenizer(path: Path) -> Any:
    """Raise ``ValueError`` with the reason."""
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(f"its tokenizer cannot be read: {error}") from error


def read_part(kind: Any, path: Path, options: Options) -> Any:
    """One model of a directory, ready to compute. Raise ``ValueError`` with the reason."""
    try:
        model = kind.from_pretrained(
            str(path), dtype=options.torch_dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return model.to(options.torch_device).eval().requires_grad_(requires_grad=False)


def read_vocoder(kind: Any, path: Path, options: Options) -> Any:
    place = path / (options.vocoder or "vocoder")
    if not place.is_dir():
        raise ValueError(f"it has no vocoder; {place} is no directory")
    return read_part(kind, place, options)


def _refuse_all_but(voice: Voice, *kinds: str) -> None:
    given = {
        "speaker": voice.speaker is not None,
        "embedding": voice.embedding is not None,
        "preset": bool(voice.preset),
        "recording": voice.recording is not None,
    }
    for kind, there in given.items():
        if there and kind not in kinds:
            raise ValueError(f"it is given by a {kind}; this model takes {' or '.join(kinds)}")


def _check_speaker(voice: Voice, speakers: int) -> None:
    if voice.speaker is not None and not 0 <= voice.speaker < speakers:
        raise ValueError(f"it is speaker {voice.speaker} of {speakers}")


def _check_width(voice: Voice, width: int | None) -> None:
    assert voice.embedding is not None
    if len(voice.embedding) != width:
        raise ValueError(f"its embedding has {len(voice.embedding)} numbers; {width} are needed")
