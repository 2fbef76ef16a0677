"""Families that generate a whole sentence at once: VITS, FastSpeech2Conformer and SpeechT5.

Segments are never padded into a batch: the decoders of the first two, and SpeechT5's post-net, have
no mask, so padding would change the end of shorter sentences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    FastSpeech2ConformerHifiGan,
    FastSpeech2ConformerModel,
    FastSpeech2ConformerWithHifiGan,
    SpeechT5ForTextToSpeech,
    SpeechT5HifiGan,
    VitsModel,
)

from workers.engines.speech import spectra
from workers.engines.speech.codec import EmitAudio
from workers.engines.speech.g2p import read_g2p
from workers.engines.speech.manner import match_span
from workers.engines.speech.mel_statistics import match_mel_statistics
from workers.engines.speech.model import Segment, Voice
from workers.engines.speech.options import Options
from workers.engines.speech.reading import (
    check_voice_source,
    read_part,
    read_tokenizer,
    read_vocoder,
)
from workers.engines.speech.source_filter_vocoder import (
    SourceFilterVocoder,
    read_source_filter_vocoder,
)
from workers.engines.speech.speaker_encoder import SpeakerEncoder, read_speaker_encoder


class _SentenceModel:
    has_speed = False
    recording_rate: int | None = None
    rate: int
    module: torch.nn.Module
    steps: Sequence[torch.nn.Module]
    loop: None = None

    def __init__(self, path: Path, options: Options) -> None:
        self._device = options.torch_device
        if (path / "graphemes").is_dir():
            self._tokenize: Callable[[str], torch.Tensor] = _read_own(read_g2p, path / "graphemes")
        else:
            tokenizer = read_tokenizer(path)
            self._tokenize = lambda text: tokenizer(text, return_tensors="pt")["input_ids"]

    def _ids(self, text: str) -> torch.Tensor:
        return self._tokenize(text).to(self._device)


class VitsSynthesizer(_SentenceModel):
    has_speed = True

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        self._model: Any = read_part(VitsModel, path, options)
        self.module, self.steps = self._model, (self._model,)
        self.rate = self._model.config.sampling_rate
        self._speakers: int = self._model.config.num_speakers
        try:
            self._tokenize("a")
        except ImportError as error:
            raise ValueError(f"the checkpoint needs phonemes as input: {error}") from error

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice, "speaker")
        _check_speaker(voice, self._speakers)
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        ids = self._ids(segment.text)
        if ids.shape[1] < 2:  # no letter of its alphabet
            return
        output = self._model(
            input_ids=ids,
            speaker_id=(segment.voice.speaker or 0) if self._speakers > 1 else None,
            speaking_rate=self._model.config.speaking_rate * segment.speed,
        )
        emit(output.waveform[0])


class FastSpeechSynthesizer(_SentenceModel):
    """A checkpoint can have folders in our own formats: ``graphemes`` instead of a tokenizer,
    ``reference`` to embed voices from recordings, and a ``vocoder`` of type ``excited``."""

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        self._speaker_encoder: SpeakerEncoder | None = None
        if (path / (options.vocoder or "vocoder")).is_dir():
            self._model: Any = read_part(FastSpeech2ConformerModel, path, options)
            self._vocoder: Any = _read_vocoder(path, options)
            self.module = torch.nn.ModuleList([self._model, self._vocoder])
        else:
            combined: Any = read_part(FastSpeech2ConformerWithHifiGan, path, options)
            self._model, self._vocoder, self.module = combined.model, combined.vocoder, combined
        self.steps = (self._model, self._vocoder)
        source_filter = isinstance(self._vocoder, SourceFilterVocoder)
        self.rate = spectra.RATE if source_filter else self._vocoder.config.sampling_rate
        self._speakers: int = self._model.config.num_speakers or 1
        self._width: int | None = self._model.config.speaker_embed_dim
        if (path / "reference").is_dir():
            self._speaker_encoder = _read_own(read_speaker_encoder, path / "reference", options)
            self.recording_rate = spectra.RATE

    def check(self, voice: Voice) -> Voice:
        kinds = ("speaker", "embedding", *(["recording"] if self._speaker_encoder else []))
        check_voice_source(voice, *kinds)
        _check_speaker(voice, self._speakers)
        if voice.recording is not None:
            assert self._speaker_encoder is not None
            profile = self._speaker_encoder.embed(torch.from_numpy(voice.recording))
            voice = replace(
                voice,
                recording=None,
                embedding=profile.embedding,
                statistics=profile.statistics,
                manner=profile.manner,
                speed=profile.speed,
            )
        if voice.embedding is not None:
            _check_width(voice, self._width)
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        voice, speaker = segment.voice, {}
        if self._speakers > 1:
            speaker["speaker_ids"] = torch.tensor([[voice.speaker or 0]], device=self._device)
        if voice.embedding is not None:
            embedding = voice.embedding[None].to(self._device, self._model.dtype)
            speaker["speaker_embedding"] = embedding
        ids = self._ids(segment.text)
        if not ids.shape[1]:  # no letter of its alphabet
            return
        spectrogram = self._model(ids, return_dict=True, **speaker).spectrogram
        if voice.statistics is not None and isinstance(self._vocoder, SourceFilterVocoder):
            frames = match_mel_statistics(
                spectrogram[0].float(), voice.statistics.to(spectrogram.device)
            )
            spectrogram = (frames if voice.manner is None else match_span(frames, voice.manner))[
                None
            ]
        emit(self._vocoder(spectrogram)[0])


class SpeechT5Synthesizer(_SentenceModel):
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
            raise ValueError("SpeechT5 has no built-in voice; the entry needs voices")

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice, "embedding")
        if voice.embedding is None:
            raise ValueError("it needs an embedding")
        _check_width(voice, self._model.config.speaker_embedding_dim)
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        assert segment.voice.embedding is not None
        ids = self._ids(segment.text)
        reduction = self._model.config.reduction_factor
        ratio_max = segment.seconds * self._steps_a_second * reduction / ids.shape[1]
        embedding = segment.voice.embedding[None].to(self._device, self._model.dtype)
        emit(
            self._model.generate_speech(
                ids, embedding, vocoder=self._vocoder, maxlenratio=min(20.0, ratio_max)
            )
        )


def _read_vocoder(path: Path, options: Options) -> Any:
    folder = path / (options.vocoder or "vocoder")
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("model_type") == "excited":
        return _read_own(read_source_filter_vocoder, folder, options)
    return read_vocoder(FastSpeech2ConformerHifiGan, path, options)


def _read_own(read: Callable[[Path], Any], path: Path, options: Options | None = None) -> Any:
    """Load a component in our own format. Raise ``ValueError`` with the reason if that fails."""
    try:
        part = read(path)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if options is None:
        return part
    part = part.to(options.torch_device, options.torch_dtype)
    return part.eval().requires_grad_(requires_grad=False)


def _check_speaker(voice: Voice, speakers: int) -> None:
    if voice.speaker is not None and not 0 <= voice.speaker < speakers:
        raise ValueError(f"it is speaker {voice.speaker} of {speakers}; they count from 0")


def _check_width(voice: Voice, width: int | None) -> None:
    assert voice.embedding is not None
    if len(voice.embedding) != width:
        raise ValueError(f"its embedding has {len(voice.embedding)} numbers; it must have {width}")
