"""Tiny random checkpoints of every supported family, of the real classes, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from workers.engines.speech.source_filter_vocoder import SourceFilterVocoder
from workers.engines.speech.speaker_encoder import SpeakerEncoder
from workers.engines.speech.spectra import CHANNELS

LETTERS = "abcdefghijklmnopqrstuvwxyz '.,!?[]0123456789S"
RATE = 8_000


def make_checkpoint(name: str, path: Path) -> Path:
    """Save a checkpoint of a family, the same one every time."""
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MAKERS[name](path)
    return path


def _letters(path: Path, *, specials: tuple[str, ...] = ()) -> Any:
    """A tokenizer of single letters."""
    named = ["<pad>", "</s>", "<unk>", "<s>", *specials]
    vocabulary = {word: i for i, word in enumerate([*named, *LETTERS, *LETTERS.upper()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(specials),
    )
    made.save_pretrained(path)
    return made


def _vits(path: Path, **settings: Any) -> None:
    config = t.VitsConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        posterior_encoder_num_wavenet_layers=1,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        upsample_initial_channel=16,
        upsample_rates=[8, 4],
        upsample_kernel_sizes=[16, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        duration_predictor_num_flows=1,
        duration_predictor_filter_channels=16,
        depth_separable_num_layers=1,
        wavenet_kernel_size=3,
        sampling_rate=RATE,
        **settings,
    )
    t.VitsModel(config).save_pretrained(path)
    vocabulary = path / "vocabulary.json"
    vocabulary.write_text(json.dumps({c: i for i, c in enumerate("_" + LETTERS[:28] + "-")}))
    t.VitsTokenizer(
        str(vocabulary), pad_token="_", unk_token="-", phonemize=False, language="eng"
    ).save_pretrained(path)


def _speecht5(path: Path) -> None:
    config = t.SpeechT5Config(
        vocab_size=120,
        hidden_size=16,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        num_mel_bins=8,
        reduction_factor=2,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2,
        speaker_embedding_dim=6,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=1,
        max_text_positions=600,
    )
    model = t.SpeechT5ForTextToSpeech(config)
    model.speech_decoder_postnet.prob_out.bias.data.fill_(-3)
    model.save_pretrained(path)
    _letters(path)
    _hifigan(t.SpeechT5HifiGan, t.SpeechT5HifiGanConfig).save_pretrained(path / "vocoder")
    for name, seed in (("ann", 1), ("bob", 2)):
        np.save(path / f"{name}.npy", np.random.RandomState(seed).randn(6).astype(np.float32))


def _hifigan(kind: Any, config: Any) -> Any:
    made = kind(_hifigan_config(config))
    return _heard(made)


def _heard(vocoder: Any) -> Any:
    """Weights as they begin are so small that nothing comes of them."""
    for weight in vocoder.parameters():
        weight.data.normal_(std=0.2)
    return vocoder


def _hifigan_config(config: Any) -> Any:
    return config(
        model_in_dim=8,
        sampling_rate=RATE,
        upsample_initial_channel=16,
        upsample_rates=[8, 4],
        upsample_kernel_sizes=[16, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )


def _conformer_config(**settings: int) -> Any:
    return t.FastSpeech2ConformerConfig(
        hidden_size=16,
        encoder_num_attention_heads=2,
        encoder_layers=1,
        encoder_linear_units=16,
        decoder_layers=1,
        decoder_num_attention_heads=2,
        decoder_linear_units=16,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=16,
        duration_predictor_layers=1,
        duration_predictor_channels=16,
        energy_predictor_layers=1,
        energy_predictor_channels=16,
        pitch_predictor_layers=1,
        pitch_predictor_channels=16,
        **settings,
    )


def _fastspeech(path: Path) -> None:
    model = _conformer_config(vocab_size=120, num_mel_bins=8, num_speakers=3)
    vocoder = _hifigan_config(t.FastSpeech2ConformerHifiGanConfig)
    config = t.FastSpeech2ConformerWithHifiGanConfig(
        model_config=model.to_dict(), vocoder_config=vocoder.to_dict()
    )
    made = t.FastSpeech2ConformerWithHifiGan(config)
    made.model.duration_predictor.linear.bias.data.fill_(1.6)
    _heard(made.vocoder)
    made.save_pretrained(path)
    _letters(path)


def _parts(path: Path) -> None:
    """A FastSpeech2Conformer that reads, hears and sounds by parts of ours."""
    config = _conformer_config(vocab_size=8, num_mel_bins=CHANNELS, speaker_embed_dim=6)
    model = t.FastSpeech2ConformerModel(config)
    model.duration_predictor.linear.bias.data.fill_(1.6)
    model.save_pretrained(path)
    sounds = ["a", "b", "n", "_,", "_.", "_?", "_!"]
    letters = [0, 1, 2, 14]  # any, a, b, n
    tree = {
        "letter": np.array(letters, np.uint8),
        "children": np.array([3, 0, 0, 0], np.uint8),
        "chunk": np.array([0, 1, 2, 3], np.uint16),
    }
    _part(path / "graphemes", {"sounds": sounds, "chunks": [[], [0], [1], [2]]})
    save_arrays(tree, path / "graphemes" / "model.safetensors")
    vocoder = SourceFilterVocoder(width=8, depth=1)
    _part(path / "vocoder", {"model_type": "excited", "width": 8, "depth": 1})
    save_file(vocoder.state_dict(), path / "vocoder" / "model.safetensors")
    _part(path / "reference", {"width": 8, "size": 6})
    ear = SpeakerEncoder(width=8, size=6)
    save_file(ear.state_dict(), path / "reference" / "model.safetensors")


def _part(path: Path, config: dict[str, Any]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))


def _encodec(**settings: Any) -> Any:
    return t.EncodecConfig(
        **{
            "target_bandwidths": [24.0],
            "sampling_rate": RATE,
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": 16,
            "codebook_dim": 8,
            "upsampling_ratios": [8, 4],
            "num_lstm_layers": 1,
            "norm_type": "weight_norm",
            **settings,
        }
    )


def _bark(path: Path) -> None:
    small: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "bias": True}
    words, codes, text = 40, 16, 120
    coarse = words + 2 * codes
    config = t.BarkConfig(
        semantic_config={
            **small,
            "block_size": 96,
            "input_vocab_size": words + 8 + text,
            "output_vocab_size": words + 8,
        },
        coarse_acoustics_config={
            **small,
            "block_size": 96,
            "input_vocab_size": coarse + 8,
            "output_vocab_size": coarse + 8,
        },
        fine_acoustics_config={
            **small,
            "block_size": 128,
            "input_vocab_size": codes + 1,
            "output_vocab_size": codes + 1,
            "n_codes_total": 4,
            "n_codes_given": 1,
        },
        codec_config=_encodec(target_bandwidths=[8.0]).to_dict(),
    )
    model = t.BarkModel(config)
    limits: dict[str, Any] = {
        "semantic_config": {
            "eos_token_id": words,
            "do_sample": True,
            "max_new_tokens": 48,
            "text_encoding_offset": words + 8,
            "text_pad_token": words + 1,
            "semantic_pad_token": words,
            "semantic_infer_token": words + 2,
            "semantic_vocab_size": words,
            "max_input_semantic_length": 40,
            "semantic_rate_hz": 250,
        },
        "coarse_acoustics_config": {
            "do_sample": True,
            "coarse_semantic_pad_token": coarse + 1,
            "coarse_rate_hz": 500,
            "n_coarse_codebooks": 2,
            "coarse_infer_token": coarse + 2,
            "max_coarse_input_length": 16,
            "max_coarse_history": 40,
            "sliding_window_len": 12,
        },
        "fine_acoustics_config": {
            "temperature": 0.5,
            "max_fine_history_length": 64,
            "max_fine_input_length": 128,
            "n_fine_codebooks": 4,
        },
        "sample_rate": RATE,
        "codebook_size": codes,
    }
    model.generation_config = t.GenerationConfig(**limits)
    _loud(model.codec_model)
    for weight in (*model.semantic.parameters(), *model.coarse_acoustics.parameters()):
        if weight.ndim == 2:
            weight.data.normal_()  # so that what was said before is heard
    model.semantic.lm_head.weight.data[words] = 0  # it ends now and then
    model.save_pretrained(path)
    _letters(path)
    _presets(path, words=words, codes=codes)


def _presets(path: Path, *, words: int, codes: int) -> None:
    """One as a file of its own, one in Bark's list, and one that is broken."""
    chance = np.random.RandomState(3)
    ann, bob = (
        {
            "semantic_prompt": chance.randint(0, words, 10),
            "coarse_prompt": chance.randint(0, codes, (2, 20)),
            "fine_prompt": chance.randint(0, codes, (4, 20)),
        }
        for _ in range(2)
    )
    np.savez(path / "ann.npz", **ann)
    np.savez(path / "broken.npz", **(ann | {"coarse_prompt": ann["coarse_prompt"] + codes}))
    np.savez(path / "part.npz", semantic_prompt=ann["semantic_prompt"])
    files = {name: f"speaker_embeddings/bob_{name}.npy" for name in bob}
    (path / "speaker_embeddings").mkdir(exist_ok=True)
    for name, file in files.items():
        np.save(path / file, bob[name])
    index = {"repo_or_path": "somebody/bark", "v2/bob": files}
    (path / "speaker_embeddings_path.json").write_text(json.dumps(index))


def _dia(path: Path) -> None:
    size: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    decoder = {
        **size,
        "cross_num_attention_heads": 2,
        "cross_head_dim": 8,
        "cross_num_key_value_heads": 2,
        "cross_hidden_size": 16,
        "vocab_size": 20,
        "num_channels": 4,
        "max_position_embeddings": 1000,
        "pad_token_id": 17,
        "eos_token_id": 16,
        "bos_token_id": 18,
    }
    config = t.DiaConfig(encoder_config=size, decoder_config=decoder, delay_pattern=[0, 2, 3, 4])
    model = t.DiaForConditionalGeneration(config)
    model.generation_config = t.GenerationConfig(
        do_sample=True,
        guidance_scale=3.0,
        top_k=12,
        temperature=1.3,
        max_length=300,
        bos_token_id=18,
        decoder_start_token_id=18,
        pad_token_id=17,
        eos_token_id=16,
    )
    ends = model.logits_dense.weight.view(4, 20, 16)[:, 16]
    ends.data *= 0.3  # it ends now and then
    model.save_pretrained(path)
    t.DiaTokenizer().save_pretrained(path)
    t.DiaFeatureExtractor(sampling_rate=RATE, hop_length=32).save_pretrained(path)
    codec = t.DacConfig(
        encoder_hidden_size=4,
        decoder_hidden_size=16,
        downsampling_ratios=[4, 8],
        n_codebooks=4,
        codebook_size=16,
        codebook_dim=4,
        sampling_rate=RATE,
    )
    vocoder = t.DacModel(codec)
    for parameter in vocoder.decoder.parameters():
        parameter.data *= 2
    vocoder.save_pretrained(path / "vocoder")


CSM_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{{ message['content'][0]['text'] + '</s>' }}"
    "{% if message['content'] | length > 1 %}<|AUDIO|><|audio_eos|>{% endif %}{% endfor %}"
)


def _mimi() -> Any:
    """With the strides that CSM's processor counts on."""
    return t.MimiConfig(
        num_filters=2,
        hidden_size=16,
        upsample_groups=16,
        codebook_size=16,
        codebook_dim=8,
        num_quantizers=4,
        num_semantic_quantizers=1,
        vector_quantization_hidden_dimension=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        sliding_window=20,
    )


def _csm(path: Path) -> None:
    tokenizer = _letters(path, specials=("<|AUDIO|>", "<|audio_eos|>"))
    audio, end = tokenizer.convert_tokens_to_ids(["<|AUDIO|>", "<|audio_eos|>"])
    small: dict[str, Any] = {
        "num_codebooks": 4,
        "vocab_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    depth = {"hidden_size": 16, "backbone_hidden_size": 16, "max_position_embeddings": 8}
    config = t.CsmConfig(
        **small,
        hidden_size=16,
        text_vocab_size=max(tokenizer.get_vocab().values()) + 1,
        codebook_pad_token_id=9,
        codebook_eos_token_id=0,
        bos_token_id=3,
        pad_token_id=0,
        audio_token_id=audio,
        audio_eos_token_id=end,
        depth_decoder_config={**small, **depth},
        codec_config=_mimi().to_dict(),
    )
    model = t.CsmForConditionalGeneration(config)
    for of in (model, model.depth_decoder):
        of.generation_config.do_sample = True
    _loud(model.codec_model)
    model.save_pretrained(path)
    features = t.EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
    t.CsmProcessor(features, tokenizer, chat_template=CSM_TEMPLATE).save_pretrained(path)


def _musicgen(path: Path, **settings: Any) -> None:
    text = t.T5Config(vocab_size=120, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    decoder = t.MusicgenDecoderConfig(
        vocab_size=16,
        num_codebooks=4,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=16,
        bos_token_id=16,
        **settings,
    )
    config = t.MusicgenConfig(
        text_encoder=text.to_dict(),
        audio_encoder=_encodec(use_causal_conv=False).to_dict(),
        decoder=decoder.to_dict(),
    )
    model = t.MusicgenForConditionalGeneration(config)
    model.generation_config = t.GenerationConfig(
        do_sample=True,
        guidance_scale=3.0,
        decoder_start_token_id=16,
        pad_token_id=16,
        max_length=50,
    )
    _loud(model.audio_encoder)
    model.save_pretrained(path)
    _letters(path)


def _loud(codec: Any) -> None:
    """Randomise the codec embeddings, which are zeros at first and would give silence."""
    for name, buffer in codec.named_buffers():
        if "embed" in name:
            buffer.normal_(std=0.3)


MAKERS = {
    "csm": _csm,
    "musicgen": _musicgen,
    "musicgen-stereo": lambda path: _musicgen(path, audio_channels=2),
    "vits": _vits,
    "vits-speakers": lambda path: _vits(path, num_speakers=3, speaker_embedding_size=8),
    "speecht5": _speecht5,
    "fastspeech2_conformer": _fastspeech,
    "parts": _parts,
    "bark": _bark,
    "dia": _dia,
}
