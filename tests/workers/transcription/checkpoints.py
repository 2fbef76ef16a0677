"""A tiny random Whisper checkpoint, whose windows are two seconds long."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.workers.llm.checkpoints import TEXT
from workers.media.audio import encode_audio
from workers.media.pixels import Audio

SECONDS: Final = 2
RATE: Final = 16_000
POSITIONS: Final = 50 * SECONDS
LANGUAGES: Final = ("en", "de", "fr")
_SPECIAL: Final = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{place * 0.02:.2f}|>" for place in range(POSITIONS + 1)),
)


def make_checkpoint(path: Path, *, seed: int = 5, timestamps: bool = True, **changes: Any) -> Path:
    """Write a random model. Without ``timestamps`` it never produces one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIAL[0], pad_token=_SPECIAL[0]
    )
    wrapped.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    ids = wrapped.get_vocab()
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=len(wrapped),
        num_mel_bins=20,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=POSITIONS,
        max_target_positions=48,
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        median_filter_width=3,
        **changes,
    )
    model = WhisperForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            # Sharper than a fresh initialisation, so that greedy choices are far from ties.
            torch.nn.init.normal_(parameter, std=0.4)
    torch.nn.init.normal_(model.model.decoder.embed_tokens.weight, std=0.3)
    first_time = ids["<|0.00|>"]
    stamps = [] if timestamps else list(range(first_time, len(wrapped)))
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids["<|startoftranscript|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|endoftext|>"],
        max_length=48,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        suppress_tokens=[3, *range(ids["<|startoftranscript|>"], first_time - 1), *stamps],
        begin_suppress_tokens=[4, ids["<|endoftext|>"]],
        max_initial_timestamp_index=20,
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        return_timestamps=False,
    )
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
    WhisperFeatureExtractor(
        feature_size=20, sampling_rate=RATE, hop_length=160, chunk_length=SECONDS, n_fft=400
    ).save_pretrained(path)
    return path


def sound(seconds: float, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return noise whose loudness and pitch change, mono at 16 kHz."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (200 + 900 * np.abs(np.sin(2 * time + seed))) * time)
    mixed = 0.5 * tone * np.abs(np.sin(3 * time)) + 0.05 * random.standard_normal(len(time))
    return np.clip(mixed, -1, 1).astype(np.float32)


def wav(samples: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    return encode_audio(Audio(samples[None], RATE), "wav")
