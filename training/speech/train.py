"""Trains the acoustic model and the speaker encoder of ``pocket-speech`` on the teacher's speech.

    python -m training.speech.train --stage samples --samples /tmp/samples
    python -m training.speech.train --samples /tmp/samples --minutes 40 --out DIR
    python -m training.speech.train --stage voices --out DIR

The voice of a sample is always given by another sentence in the same voice, so that the encoder
learns what the sentences of a voice have in common, and the model to synthesise any voice.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import FastSpeech2ConformerConfig, FastSpeech2ConformerModel
from transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer import (
    length_regulator,
)

from training.common.loop import Mean, adam, clock, set_rate, step
from training.speech.samples import SOUNDS, Sample, StoredSample, make_samples, read, write
from training.speech.speakers import SPEAKERS
from training.speech.teacher import Teacher
from workers.engines.speech.speaker_encoder import SpeakerEncoder, read_speaker_encoder
from workers.engines.speech.spectra import CHANNELS, MELS

WIDTH: Final = 128
VOICE: Final = 32
_EAR: Final = 80
_BATCH: Final = 12
_SYLLABLES: Final = 4.7
"""Syllables per second of the model's speech, by ``manner``."""
_REDUCTION: Final = 2
"""Frames generated in one decoder step."""
_MEETING: Final = 8
"""Steps between two averagings of the processes' weights."""
_REFERENCE: Final = 160
"""Frames of a reference recording: two seconds."""
_SHARDS_MAX: Final = 30
_LONGEST: Final = 240
"""Maximum frames of a sample; longer ones cost more time than they improve the model."""


def make_model() -> Any:
    config = FastSpeech2ConformerConfig(
        hidden_size=WIDTH,
        vocab_size=len(SOUNDS) + 1,
        num_mel_bins=CHANNELS,
        reduction_factor=_REDUCTION,
        encoder_normalize_before=True,
        decoder_normalize_before=True,
        encoder_layers=3,
        encoder_linear_units=4 * WIDTH,
        decoder_layers=3,
        decoder_num_attention_heads=1,
        decoder_linear_units=2 * WIDTH,
        positionwise_conv_kernel_size=1,
        use_macaron_style_in_conformer=False,
        encoder_kernel_size=7,
        decoder_kernel_size=11,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=64,
        speech_decoder_postnet_dropout=0.0,
        duration_predictor_channels=128,
        duration_predictor_dropout_rate=0.0,
        energy_predictor_layers=1,
        energy_predictor_channels=8,
        energy_predictor_dropout=0.0,
        pitch_predictor_layers=2,
        pitch_predictor_channels=128,
        pitch_predictor_kernel_size=5,
        pitch_predictor_dropout=0.0,
        stop_gradient_from_pitch_predictor=False,
        encoder_dropout_rate=0.0,
        encoder_positional_dropout_rate=0.0,
        encoder_attention_dropout_rate=0.0,
        decoder_dropout_rate=0.0,
        decoder_positional_dropout_rate=0.0,
        decoder_attention_dropout_rate=0.0,
        max_source_positions=1500,
        speaker_embed_dim=VOICE,
    )
    model = FastSpeech2ConformerModel(config)
    with torch.no_grad():  # a unit vector would have too little influence beside the phonemes
        model.projection.weight[:, WIDTH:] *= 4
        model.energy_predictor.linear.weight.zero_()  # the decoder learns the loudness
        model.energy_predictor.linear.bias.zero_()
    return model


@dataclass(frozen=True, slots=True)
class Batch:
    ids: torch.Tensor
    steps: torch.Tensor
    """Decoder steps of each phoneme."""
    pitch: torch.Tensor
    features: torch.Tensor
    mask: torch.Tensor
    """1 for frames, 0 for padding."""
    references: torch.Tensor
    reference_mask: torch.Tensor
    """The same for the references."""


class SamplePool:
    """Samples by voice, from all files written so far."""

    def __init__(self, folder: Path, r: random.Random) -> None:
        self._folder, self._r = folder, r
        self._seen: set[Path] = set()
        self._voices: dict[tuple[Path, int], list[StoredSample]] = defaultdict(list)
        self._numbers = {name: place + 1 for place, name in enumerate(SOUNDS)}
        self.look()

    def look(self) -> None:
        for path in sorted(set(self._folder.glob("*.pt")) - self._seen)[:_SHARDS_MAX]:
            self._seen.add(path)
            for one in read([path], sound=False):
                known = all(name in self._numbers for name in one.sample.sounds)
                if known and len(one.sample.features) <= _LONGEST:
                    self._voices[path, one.voice].append(one)

    def batch(self) -> Batch:
        """Choose a batch of samples of similar length, each in another voice."""
        several = [voice for voice in self._voices.values() if len(voice) > 1]
        voices = self._r.sample(several, min(_BATCH, len(several)))
        length = len(self._r.choice(self._r.choice(voices)).sample.features)
        pairs = []
        for voice in voices:
            some = self._r.sample(voice, min(5, len(voice)))
            chosen = min(some[1:], key=lambda one: abs(len(one.sample.features) - length))
            pairs.append((chosen.sample, some[0].sample))
        rows = [self._row(sample, other) for sample, other in pairs]
        return Batch(
            *(nn.utils.rnn.pad_sequence(one, True) for one in map(list, zip(*rows, strict=True)))
        )

    def _row(self, sample: Sample, other: Sample) -> tuple[torch.Tensor, ...]:
        ends = (sample.frames.cumsum(0) / _REDUCTION).round().long()
        ends[-1] = -(-len(sample.features) // _REDUCTION)
        lack = int(ends[-1]) * _REDUCTION - len(sample.features)
        features = torch.cat([sample.features, sample.features[-1:].expand(lack, -1)])
        reference = self._reference(other.features)
        return (
            torch.tensor([self._numbers[name] for name in sample.sounds]),
            ends.diff(prepend=torch.zeros(1, dtype=torch.long)),
            _mean_pitch(sample.features[:, MELS], sample.frames)[:, None],
            features,
            torch.ones(len(features)),
            reference,
            torch.ones(len(reference)),
        )

    def _reference(self, features: torch.Tensor) -> torch.Tensor:
        """Choose a part of a recording, and add noise, as in recordings of varying quality."""
        at = self._r.randrange(max(1, len(features) - _REFERENCE))
        part = features[at : at + _REFERENCE].clone()
        if self._r.random() < 0.7:
            floor = self._r.uniform(-2.5, 0)
            part[:, :MELS] = torch.logaddexp(part[:, :MELS] * 2.5, torch.tensor(floor * 2.5)) / 2.5
            part[:, :MELS] += self._r.uniform(-0.1, 0.1)
        return part


def _mean_pitch(pitch: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    sums = F.pad(pitch.cumsum(0), (1, 0))
    ends = frames.cumsum(0)
    made: torch.Tensor = (sums[ends] - sums[ends - frames]) / frames.clamp(min=1)
    return made


def losses(model: Any, ear: SpeakerEncoder, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the losses of frames, durations, pitch, and of distinguishing the voices.

    As in transformers, whose own forward pass does not support training with several frames per
    step.
    """
    voice = ear(batch.references, batch.reference_mask)
    own = ear(batch.features * batch.mask[..., None], batch.mask)
    told = F.cross_entropy(voice @ own.T / 0.1, torch.arange(len(voice)))
    sounds = batch.ids > 0
    states = model.encoder(batch.ids, sounds.long()[:, None], return_dict=True)[0]
    spread = voice[:, None].expand(-1, states.shape[1], -1)
    states = model.projection(torch.cat([states, spread], -1))
    pitch = model.pitch_predictor(states, ~sounds[..., None])
    duration = model.duration_predictor(states)
    states = states + model.pitch_embed(batch.pitch)
    states = states + model.energy_embed(torch.zeros_like(batch.pitch))
    states = length_regulator(states, batch.steps)  # type: ignore[no-untyped-call]
    steps = batch.mask[:, ::_REDUCTION].int()
    states = model.decoder(states, steps[:, None], return_dict=True)[0]
    frames = batch.mask > 0
    draws = model.speech_decoder_postnet(states)
    drawn = [(one - batch.features).abs()[frames] for one in draws]
    frame = sum(one.mean() + 0.05 * one[:, MELS:].mean() for one in drawn)
    frame = frame + (_timbre(draws[-1], batch) - _timbre(batch.features, batch)).abs().mean()
    late = (duration - torch.log(batch.steps + 1.0))[sounds].square().mean()
    high = (pitch - batch.pitch)[sounds].square().mean()
    return frame, late, high, told


def _timbre(features: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return mean and deviation of each mel band. They distinguish voices, and show if generated
    features vary too little."""
    weights = (batch.mask / batch.mask.sum(1, keepdim=True))[..., None]
    mel = features[..., :MELS]
    mean = (mel * weights).sum(1, keepdim=True)
    spread = ((mel - mean).square() * weights).sum(1, keepdim=True).clamp(min=1e-4).sqrt()
    return torch.cat([mean, spread], -1)


def train(
    folder: Path, *, minutes: float, seed: int, out: Path, go_on: bool, rank: int, meet: Path | None
) -> None:
    """Train alone, or as one of several processes that average their weights.

    ``meet`` is the file through which the processes find each other.
    """
    torch.manual_seed(seed)
    r = random.Random(seed + rank)
    model, ear = make_model(), SpeakerEncoder(width=_EAR, size=VOICE)
    if go_on:
        model.load_state_dict(FastSpeech2ConformerModel.from_pretrained(str(out)).state_dict())
        ear = read_speaker_encoder(out / "reference")
    pool = SamplePool(folder, r)
    model.train()
    weights = [*model.parameters(), *ear.parameters()]
    rest = [one for one in model.buffers() if one.is_floating_point() and one.ndim == 1]
    optimizer = adam((weights, 1e-3 if go_on else 2e-3))
    mean = Mean(weights, keep=0.99)
    shown, turns, done = torch.zeros(4), 0, 0.0
    for now in clock(10 * minutes):
        done = done if meet else 10 * now
        set_rate(optimizer, done)
        found = losses(model, ear, pool.batch())
        step(optimizer, weights, found[0] + found[1] + found[2] + 0.1 * found[3])
        mean.update()
        turns += 1
        heard = torch.stack([one.detach().float() for one in found])
        shown += (heard - shown) * max(0.02, 1 / turns)
        if meet and turns % _MEETING == 0:
            done = _average([*weights, *rest], 10 * now)
        if rank == 0 and turns % 50 == 0:
            said = " ".join(f"{value:.3f}" for value in shown.tolist())
            print(f"voice {done:.2f} step {turns} losses {said}", flush=True)
        if turns % 50 == 0:
            pool.look()
        if rank == 0 and turns % 100 == 0:
            _save_mean(model, ear, mean, out)
        if done >= 1:
            break
    if rank == 0:
        _save_mean(model, ear, mean, out)
        print(f"{turns} steps")


@torch.no_grad()
def _average(weights: list[torch.Tensor], done: float) -> float:
    """Average the weights of all processes, and the elapsed fraction, so that all end together."""
    all_of = torch.cat([*(one.flatten() for one in weights), torch.tensor([done])])
    torch.distributed.all_reduce(all_of)
    all_of /= torch.distributed.get_world_size()
    at = 0
    for one in weights:
        one.copy_(all_of[at : at + one.numel()].view_as(one))
        at += one.numel()
    return float(all_of[-1])


def _save_mean(model: Any, ear: SpeakerEncoder, mean: Mean, out: Path) -> None:
    mean.swap()
    part = Path(str(out) + ".part")
    save(model, ear, part)
    for one in sorted(part.rglob("*.*")):
        place = out / one.relative_to(part)
        place.parent.mkdir(parents=True, exist_ok=True)
        one.replace(place)
    mean.swap()


def save(model: Any, ear: SpeakerEncoder, out: Path) -> None:
    deepcopy(model).bfloat16().save_pretrained(str(out))
    (out / "reference").mkdir(parents=True, exist_ok=True)
    heard = {name: value.bfloat16() for name, value in ear.state_dict().items()}
    save_file(heard, out / "reference" / "model.safetensors")
    config = {"width": _EAR, "size": VOICE, "syllables": _SYLLABLES}
    (out / "reference" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_voices(out: Path, *, seed: int, each: int = 8) -> None:
    """Save the speaker embeddings of the catalog's voices, averaged over ``each`` recordings."""
    ear, teacher, r = read_speaker_encoder(out / "reference"), Teacher(), random.Random(seed)
    (out / "voices").mkdir(exist_ok=True)
    for name, manner in SPEAKERS.items():
        # Several sentences per recording: one word is too short for an embedding.
        said = [one.audio for one in make_samples(teacher, r, manner, 3 * each)]
        with torch.no_grad():
            heard = [ear.embed(torch.cat(said[at::each])).embedding for at in range(each)]
        voice = F.normalize(torch.stack(heard).mean(0), dim=0)
        save_file({"voice": voice}, out / "voices" / f"{name}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=("samples", "voice", "voices"), default="voice")
    parser.add_argument("--samples", type=Path, default=Path("samples"))
    parser.add_argument("--shards", type=int, default=30)
    parser.add_argument("--voices", type=int, default=40, help="voices in each shard")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/speech"))
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--meet", type=Path, help="new file by which several processes connect")
    parser.add_argument("--rank", type=int, default=0, help="rank of this process")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.stage == "samples":
        write(given.samples, seed=given.seed, shards=given.shards, voices=given.voices)
    elif given.stage == "voices":
        write_voices(given.out, seed=given.seed)
    else:
        if given.meet:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{given.meet.absolute()}",
                rank=given.rank,
                world_size=given.ranks,
                timeout=timedelta(minutes=20),
            )
        train(
            given.samples,
            minutes=given.minutes,
            seed=given.seed,
            out=given.out,
            go_on=given.go_on,
            rank=given.rank,
            meet=given.meet,
        )


if __name__ == "__main__":
    main()
