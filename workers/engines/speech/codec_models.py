"""Families that generate codec tokens: CSM, MusicGen, Bark and Dia.

Bark's segments are calls of the library's own ``generate``; those of the others are rows of a
``TokenLoop``, whose prompts run in the library's modules, one by one. The codec always computes in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    BarkModel,
    CsmForConditionalGeneration,
    CsmProcessor,
    DacModel,
    DiaFeatureExtractor,
    DiaForConditionalGeneration,
    DiaProcessor,
    DynamicCache,
    MusicgenForConditionalGeneration,
)
from transformers.models.bark import generation_configuration_bark

from workers.engines.speech.codec import EmitAudio, StreamingDecoder, measure_codec
from workers.engines.speech.model import Segment, Voice
from workers.engines.speech.options import Options
from workers.engines.speech.reading import (
    check_voice_source,
    read_part,
    read_processor,
    read_tokenizer,
    read_vocoder,
)
from workers.engines.speech.text import FIRST_TURN_TAG, TURN_TAG
from workers.engines.speech.token_decoders import CsmLoop, DiaLoop, MusicgenLoop
from workers.engines.speech.token_loop import TokenLoop, last_hidden


class _CodecModel:
    has_speed = False
    recording_rate: int | None = None
    rate: int
    module: torch.nn.Module
    steps: Sequence[torch.nn.Module]
    loop: TokenLoop | None = None

    def __init__(self, options: Options) -> None:
        self._device = options.torch_device


class CsmSynthesizer(_CodecModel):
    """Uses a ``speaker``, or continues a recording, given with its transcript."""

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(options)
        self._processor: Any = read_processor(CsmProcessor, path)
        if self._processor.chat_template is None:
            raise ValueError("its processor has no chat template")
        self._model: Any = read_part(CsmForConditionalGeneration, path, options)
        _read_depth_settings(path, self._model.depth_decoder.generation_config)
        codec = self._model.codec_model.float()
        self.module = self._model
        self._loop = self.loop = CsmLoop(self._model)
        self.steps = (self._model.backbone_model, codec.encoder, codec.decoder)
        self.rate = self.recording_rate = self._processor.feature_extractor.sampling_rate
        self._codec = measure_codec(
            lambda codes: codec.decode(codes[None].to(self._device)).audio_values[0, 0],
            codebooks=self._model.config.num_codebooks,
            size=codec.config.codebook_size,
            rate=self.rate,
        )

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice, "speaker", "recording")
        _check_transcript(voice)
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        voice, messages = segment.voice, []
        if voice.recording is not None:
            messages.append(_message(voice, voice.transcript))
            messages[0]["content"].append({"type": "audio", "audio": voice.recording})
        messages.append(_message(voice, segment.text))
        inputs = self._processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        end = self._model.config.codebook_eos_token_id
        stream = StreamingDecoder(
            self._codec,
            emit,
            delays=[0] * self._model.config.num_codebooks,
            is_end=lambda codes: bool((codes == end).all()),
        )
        cache, hidden = self._prefill(inputs.to(self._device))
        with self._loop.open(cache, hidden, segment.seed) as row:
            self._loop.generate(row, stream, steps=self._codec.frames(segment.seconds))
        stream.finish()

    def _prefill(self, inputs: Any) -> tuple[Any, torch.Tensor]:
        inputs.pop("attention_mask", None)  # nothing is padded
        merged = self._model._merge_input_ids_with_input_values(**inputs)
        found = self._model.backbone_model(
            inputs_embeds=merged["inputs_embeds"], past_key_values=DynamicCache(), use_cache=True
        )
        return found.past_key_values, last_hidden(found.last_hidden_state)


class MusicgenSynthesizer(_CodecModel):
    """Generates music for a caption, of exactly the requested length."""

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(options)
        self._tokenizer: Any = read_tokenizer(path)
        self._model: Any = read_part(MusicgenForConditionalGeneration, path, options)
        config = self._model.config.decoder
        if config.audio_channels != 1:
            raise ValueError(f"it has {config.audio_channels} channels; only one is supported")
        codec = self._model.audio_encoder.float()
        self.module = self._model
        self._loop = self.loop = MusicgenLoop(self._model)
        self.steps = (self._model.text_encoder, self._model.decoder.model, codec.decoder)
        self.rate = codec.config.sampling_rate
        self._delays = range(config.num_codebooks)
        self._codec = measure_codec(
            lambda codes: _decode_encodec(codec, codes.to(self._device)),
            codebooks=config.num_codebooks,
            size=codec.config.codebook_size,
            rate=self.rate,
        )

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice)
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        tokens = self._tokenizer(segment.text, return_tensors="pt").to(self._device)
        stream = StreamingDecoder(self._codec, emit, delays=self._delays)
        cache, hidden = self._loop.prefill(tokens["input_ids"])
        frames = self._codec.frames(segment.seconds)
        with self._loop.open(cache, hidden, segment.seed, self._loop.delay(frames)) as row:
            self._loop.generate(row, stream, steps=frames + max(self._delays))
        stream.finish()


class BarkSynthesizer(_CodecModel):
    """Uses a preset: Bark's own tokens of an earlier utterance.

    Audio is emitted only after a whole segment: tokens are refined in overlapping windows.
    """

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(options)
        self._tokenizer: Any = read_tokenizer(path)
        self._model: Any = read_part(BarkModel, path, options)
        limits, kinds = self._model.generation_config, cast(Any, generation_configuration_bark)
        try:
            self._semantic = kinds.BarkSemanticGenerationConfig(**limits.semantic_config)
            self._coarse = kinds.BarkCoarseGenerationConfig(**limits.coarse_acoustics_config)
            self._fine = kinds.BarkFineGenerationConfig(**limits.fine_acoustics_config)
            self.rate, self._codebook_size = limits.sample_rate, limits.codebook_size
        except (AttributeError, TypeError) as error:
            raise ValueError(f"its generation_config.json is not Bark's: {error}") from error
        codec = self._model.codec_model.float()
        codec.decoder.register_forward_pre_hook(_raise_on_silence)
        self.module = self._model
        # The fine model is not run through ``__call__``, but its last norm is.
        fine = self._model.fine_acoustics.layernorm_final
        self.steps = (self._model.semantic, self._model.coarse_acoustics, fine, codec.decoder)

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice, "preset")
        if not voice.preset:
            return voice
        for name, rows, size in (
            ("semantic_prompt", None, self._semantic.semantic_vocab_size),
            ("coarse_prompt", self._coarse.n_coarse_codebooks, self._codebook_size),
            ("fine_prompt", self._fine.n_fine_codebooks, self._codebook_size),
        ):
            if name not in voice.preset:
                raise ValueError(f"its preset lacks {name}")
            array = voice.preset[name]
            if array.ndim != (1 if rows is None else 2) or rows not in (None, len(array)):
                raise ValueError(f"the {name} of its preset has the wrong shape {array.shape}")
            if not array.size or array.min() < 0 or array.max() >= size:
                raise ValueError(f"the {name} of its preset has tokens outside 0 to {size - 1}")
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        limits = self._semantic
        tokens = self._tokenizer(
            segment.text,
            return_tensors="pt",
            padding="max_length",
            max_length=limits.max_input_semantic_length,
            return_token_type_ids=False,
            add_special_tokens=False,
        ).to(self._device)
        preset = {
            name: torch.from_numpy(array).to(self._device)
            for name, array in segment.voice.preset.items()
        }
        tokens_max = min(limits.max_new_tokens, int(segment.seconds * limits.semantic_rate_hz))
        try:
            generated = self._model.generate(
                **tokens, history_prompt=preset or None, semantic_max_new_tokens=max(2, tokens_max)
            )
        except _SilenceError:
            return
        emit(generated[0])


class _SilenceError(Exception):
    """The model generated no audio; the library would fail on an empty tensor."""


def _raise_on_silence(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    if not args[0].shape[-1]:
        raise _SilenceError


class DiaSynthesizer(_CodecModel):
    """Uses a random voice, or continues a recording, given with its transcript.

    ``[S1]`` and ``[S2]`` in the text mark the turns of two speakers.
    """

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(options)
        codec = read_vocoder(DacModel, path, options).float()
        self._processor = cast(Any, DiaProcessor)(
            read_processor(DiaFeatureExtractor, path, "feature extractor"),
            read_tokenizer(path),
            audio_tokenizer=codec,
        )
        self._model: Any = read_part(DiaForConditionalGeneration, path, options)
        self.module = torch.nn.ModuleList([self._model, codec])
        self._loop = self.loop = DiaLoop(self._model)
        self.steps = (
            self._model.model.encoder,
            self._model.model.decoder,
            codec.encoder,
            codec.decoder,
        )
        self.rate = self.recording_rate = codec.config.sampling_rate
        self._delays = self._model.config.delay_pattern
        self._codec = measure_codec(
            lambda codes: codec.decode(audio_codes=codes[None].to(self._device)).audio_values[0],
            codebooks=len(self._delays),
            size=codec.config.codebook_size,
            rate=self.rate,
        )

    def check(self, voice: Voice) -> Voice:
        check_voice_source(voice, "recording")
        _check_transcript(voice)
        if voice.recording is None:
            return voice
        size, positions = len(voice.transcript.encode()), self._model.config.encoder_config
        if size > positions.max_position_embeddings // 2:
            raise ValueError(
                f"the transcript of {size} bytes is too long; it leaves no room for the text"
            )
        seconds = len(voice.recording) / self.rate
        if self._frames_left(voice) < self._codec.frames(1):
            raise ValueError(
                f"the recording of {seconds:.1f} s is too long; it leaves no room for speech"
            )
        return voice

    def synthesize(self, segment: Segment, emit: EmitAudio) -> None:
        voice, config = segment.voice, self._model.config.decoder_config
        text = segment.text
        if voice.recording is not None:
            text = f"{_first_turn(text)} {voice.transcript.strip()} {text}"
        inputs = self._processor(
            text=[text],
            audio=None if voice.recording is None else [voice.recording],
            truncation=True,
            sampling_rate=self.rate,
            delay_pattern=self._delays,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
        stream = StreamingDecoder(
            self._codec,
            emit,
            delays=self._delays,
            is_end=lambda codes: int(codes[0]) == config.eos_token_id,
        )
        frames = min(self._codec.frames(segment.seconds), self._frames_left(voice))
        cache, hidden, edit = self._loop.prefill(inputs.to(self._device), frames)
        with self._loop.open(cache, hidden, segment.seed, edit) as row:
            self._loop.generate(row, stream, steps=frames + max(self._delays))
        stream.finish()

    def _frames_left(self, voice: Voice) -> int:
        """Return the number of frames that fit after the recording."""
        recorded = 0 if voice.recording is None else -(-len(voice.recording) // self._codec.hop)
        positions: int = self._model.config.decoder_config.max_position_embeddings
        delay: int = max(self._delays)
        return positions - recorded - delay - 2


def _first_turn(text: str) -> str:
    """Return the turn tag at the start of a text, or the first speaker's."""
    found = TURN_TAG.match(text)
    return found[0] if found else FIRST_TURN_TAG


def _decode_encodec(codec: Any, codes: torch.Tensor) -> torch.Tensor:
    audio: torch.Tensor = codec.decode(codes[None, None], [None]).audio_values[0, 0]
    return audio


def _message(voice: Voice, text: str) -> dict[str, Any]:
    return {"role": str(voice.speaker or 0), "content": [{"type": "text", "text": text}]}


def _read_depth_settings(path: Path, config: Any) -> None:
    """Apply what ``generation_config.json`` says of the depth decoder, which the library drops."""
    file, prefix = path / "generation_config.json", "depth_decoder_"
    if not file.is_file():
        return
    for name, value in json.loads(file.read_text()).items():
        setting = name.removeprefix(prefix)
        if name.startswith(prefix) and setting[0] != "_" and hasattr(config, setting):
            setattr(config, setting, value)


def _check_transcript(voice: Voice) -> None:
    if voice.recording is not None and not voice.transcript.strip():
        raise ValueError("it needs the transcript of its recording")
