"""Compares the speech engine with the same model called one by one: real-time factor and TTFA.

    make bench-audio        or: python -m benchmarks.audio [--checkpoint DIRECTORY]

For each number given by ``--together``, so many concurrent requests are measured. Both runners run
in this process, alternately, on weights read from the same directory. They synthesise the same
sentences with the same seeds to the same format, so that their audio can be compared. Default
models: a small VITS and a small CSM with random weights. CSM's codec tokens are generated in shared
steps by the engine, and by the library's ``generate`` in the other runner; as both draw different
random numbers, only the length of their audio is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import numpy as np

OURS, ALONE = "ours", "one by one"
MODEL: Final = "bench"
TEXT: Final = (
    "The train to the coast leaves at nine. Nobody was on the platform but a dog, and it slept. "
    "When the doors closed it woke and looked after us for a long time."
)
SAME: Final = 1e-4
"""Maximum difference of samples in float32, with values from -1 to 1."""


@dataclass(slots=True)
class RunResult:
    """Results in seconds; ``first_s`` and ``total_s`` by request, relative to the start."""

    first_s: dict[int, float] = field(default_factory=dict)
    total_s: dict[int, float] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    audio_s: float = 0.0
    """Total duration of the audio."""
    makespan_s: float = 0.0


class Runner(Protocol):
    def run(self, requests: int) -> RunResult:
        """Synthesise ``requests`` concurrent requests; a request's number is its seed."""
        ...


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audio")
    parser.add_argument("--checkpoint", type=Path, help="directory of a speech model")
    parser.add_argument("--models", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument(
        "--voices", type=json.loads, default={}, help="voices of the catalog entry, as JSON"
    )
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=30.0, help="most of a sentence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time instead of wall time; for one thread on a busy machine",
    )
    given = parser.parse_args(arguments)
    if given.processor_time and given.threads > 1:
        parser.error("--processor-time is for one thread")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    if given.checkpoint is not None:
        _compare(str(given.checkpoint.name), given.checkpoint, given)
        return
    for name in given.models:
        with tempfile.TemporaryDirectory() as directory:
            MAKERS[name](Path(directory))
            _compare(f"{name} of random weights", Path(directory), given)


def _compare(name: str, checkpoint: Path, given: argparse.Namespace) -> None:
    now_s = time.process_time if given.processor_time else time.perf_counter
    options = {
        "threads": given.threads,
        "sentence_seconds": given.seconds,
        "slots": max(given.together),
        "voices": given.voices,
        "device": given.device,
    }
    alone = OneByOne(checkpoint, options, now_s)
    runners: dict[str, Runner] = {OURS: Ours(checkpoint, options, now_s), ALONE: alone}
    print(
        f"\n{name}: float32, {given.threads} thread(s), load {os.getloadavg()[0]:.1f}"
        + (", in processor time" if given.processor_time else "")
    )
    for runner in runners.values():
        runner.run(1)
    for together in given.together:
        result: dict[str, list[RunResult]] = {kind: [] for kind in runners}
        for _ in range(given.repeats):
            for kind, runner in runners.items():
                result[kind].append(runner.run(together))
        _print_results(together, result)
        _check_agreement(result, samples=not alone.is_generated)


def _print_results(together: int, result: Mapping[str, Sequence[RunResult]]) -> None:
    print(
        f"  {together} together{'':<14}{'real-time factor':>24}{'TTFA p50 / p95 ms':>28}"
        f"{'total p50 / p95 ms':>28}"
    )
    for kind, runs in result.items():
        factors = [run.makespan_s / run.audio_s for run in runs]
        cell = f"{statistics.median(factors):.4f}"
        if kind != OURS:
            ratios = [
                run.makespan_s / ours.makespan_s
                for run, ours in zip(runs, result[OURS], strict=True)
            ]
            cell += f" ({min(ratios):.2f}-{max(ratios):.2f} x)"
        line = f"    {kind:<20}{cell:>26}"
        for times in ([run.first_s for run in runs], [run.total_s for run in runs]):
            found = sorted(1000 * value for by_number in times for value in by_number.values())
            line += f"{f'{_p(found, 50):.0f} / {_p(found, 95):.0f}':>28}"
        print(line)


def _check_agreement(result: Mapping[str, Sequence[RunResult]], *, samples: bool) -> None:
    """Compare the audio: its samples, or only its length."""
    worst = 0.0
    for number, file in result[ALONE][0].files.items():
        wanted = _samples(file)
        for found in (_samples(run.files[number]) for runs in result.values() for run in runs):
            if found.shape != wanted.shape:
                raise RuntimeError(f"the audio of request {number} has another length")
            worst = max(worst, float(abs(found - wanted).max()) if samples else 0.0)
    if not samples:
        return
    print(f"    largest difference of the audio: {worst:.1e}; the limit is {SAME}")
    if worst > SAME:
        raise RuntimeError("the audio of the runners differs")


class Ours:
    """The step loop with the engine, as in a worker, streamed."""

    def __init__(
        self, checkpoint: Path, options: dict[str, Any], now_s: Callable[[], float]
    ) -> None:
        from workers.contract.models import ModelSpec
        from workers.engines.speech.engine import SpeechEngine
        from workers.runtime.step_loop import StepLoop

        spec = ModelSpec(MODEL, "text-to-speech", "speech", str(checkpoint), options)
        self._now_s = now_s
        self._loop = StepLoop(
            worker=MODEL,
            now_us=lambda: round(1e6 * now_s()),
            unix_ms=lambda: time.time_ns() // 1_000_000,
        )
        self._loop.add(MODEL, SpeechEngine(spec))
        if broken := self._loop.load(MODEL):
            raise ValueError(broken)

    def run(self, requests: int) -> RunResult:
        import msgspec

        from workers.contract.jobs import AudioChunk, Completed, Job, RequestId
        from workers.contract.media import SpeechInput

        result, started_s = RunResult(), self._now_s()
        for number in range(requests):
            asked = msgspec.to_builtins(SpeechInput(TEXT, seed=number, format="wav"))
            job = Job(RequestId(str(number)), "1", MODEL, "text-to-speech", asked, stream=True)
            self._loop.admit(job, queue_us=0, leased_us=round(1e6 * started_s))
        while len(result.total_s) < requests:
            report = self._loop.turn()
            after_s = self._now_s() - started_s
            for id, event in report.events:
                if isinstance(event, AudioChunk) and event.duration_ms:
                    result.first_s.setdefault(int(id), after_s)
            for id, outcome in report.outcomes:
                if not isinstance(outcome, Completed):
                    raise RuntimeError(f"request {id} ended as {outcome}")
                result.total_s[int(id)] = after_s
                result.files[int(id)] = outcome.files[0].data
                result.audio_s += outcome.usage.audio_ms / 1000
        result.makespan_s = self._now_s() - started_s
        return result


class OneByOne:
    """The library's model as a script calls it: sentence by sentence, request by request."""

    def __init__(
        self, checkpoint: Path, options: dict[str, Any], now_s: Callable[[], float]
    ) -> None:
        from workers.contract.models import ModelSpec
        from workers.engines.speech.families import family_of
        from workers.engines.speech.model import Voice, read_voice
        from workers.engines.speech.options import read_options
        from workers.engines.speech.text import Language

        spec = ModelSpec(MODEL, "text-to-speech", "speech", str(checkpoint), options)
        read = read_options(spec)
        family = family_of(spec)
        self._now_s = now_s
        self._model = family.load(checkpoint, read)
        self._voice = Voice()
        for name, given in read.voices.items():
            rate = self._model.recording_rate
            self._voice = read_voice(name, given, root=checkpoint, rate=rate, limits=read)
            break
        characters_max = read.sentence_characters or family.sentence_characters
        self._sentences = Language(read.languages[0]).sentences(TEXT, characters_max=characters_max)
        self.is_generated = self._model.loop is not None
        self._seconds, self._pause_ms = read.sentence_seconds, read.pause_ms

    def run(self, requests: int) -> RunResult:
        result, started_s = RunResult(), self._now_s()
        for number in range(requests):
            self._synthesize(number, result, started_s)
            result.total_s[number] = self._now_s() - started_s
        result.makespan_s = self._now_s() - started_s
        return result

    def _synthesize(self, number: int, result: RunResult, started_s: float) -> None:
        import numpy as np
        import torch

        from workers.engines.speech.model import Segment
        from workers.media.audio import encode_audio
        from workers.media.crossfade import Crossfader
        from workers.media.encode import Origin
        from workers.media.pixels import Audio

        crossfader = Crossfader(self._model.rate, pause_ms=self._pause_ms)
        audio_parts: list[Any] = []
        for index, sentence in enumerate(self._sentences):
            mixed = np.random.SeedSequence((number, index))
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0]))
            parts: list[Any] = []
            segment = Segment(sentence, self._voice, self._seconds)
            with torch.no_grad():
                if self.is_generated:
                    parts.append(_generate_csm(self._model, segment))
                else:
                    self._model.synthesize(segment, parts.append)
            for piece in parts:
                audio_parts.append(crossfader.add(piece.float().numpy().reshape(-1).clip(-1, 1)))
                result.first_s.setdefault(number, self._now_s() - started_s)
            audio_parts.append(crossfader.end_segment())
        samples = np.concatenate([*audio_parts, crossfader.finish()])
        origin = Origin(MODEL, str(number), number)
        audio = Audio(samples[None], self._model.rate)
        result.files[number] = encode_audio(audio, "wav", origin=origin)
        result.audio_s += len(samples) / self._model.rate


def make_checkpoint(path: Path) -> None:
    """Create a 16 kHz VITS with random weights, a tenth of the size of the published ones."""
    import torch
    import transformers as t

    letters = "_abcdefghijklmnopqrstuvwxyz '.,-"
    config = t.VitsConfig(
        vocab_size=len(letters),
        hidden_size=96,
        num_hidden_layers=3,
        ffn_dim=256,
        flow_size=96,
        spectrogram_bins=257,
        prior_encoder_num_flows=2,
        upsample_initial_channel=128,
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        duration_predictor_filter_channels=96,
        sampling_rate=16_000,
        speaking_rate=3.0,  # gives a realistic duration
    )
    torch.manual_seed(0)
    t.VitsModel(config).save_pretrained(path)
    vocabulary = path / "vocabulary.json"
    vocabulary.write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    t.VitsTokenizer(
        str(vocabulary), pad_token="_", unk_token="-", phonemize=False, language="eng"
    ).save_pretrained(path)


def make_csm(path: Path) -> None:
    """Create a CSM with random weights: a backbone of 29 million, 8 codebooks at 12.5 frames/s."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    t: Any = transformers
    letters = {letter: index for index, letter in enumerate("_abcdefghijklmnopqrstuvwxyz '.,?[]0-")}
    words = Tokenizer(models.WordLevel({**letters, "<audio>": 40, "<end>": 41}, unk_token="-"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="_",
        unk_token="-",
        additional_special_tokens=["<audio>", "<end>"],
    )
    codec = t.MimiConfig(
        num_filters=2,
        hidden_size=32,
        upsample_groups=32,
        codebook_size=256,
        codebook_dim=32,
        num_quantizers=8,
        vector_quantization_hidden_dimension=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=64,
    )
    small: dict[str, Any] = {"num_codebooks": 8, "vocab_size": 256}
    depth = {"hidden_size": 256, "backbone_hidden_size": 512, "intermediate_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = t.CsmConfig(
        **small,
        **heads,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        text_vocab_size=42,
        codebook_pad_token_id=254,
        codebook_eos_token_id=255,
        bos_token_id=1,
        pad_token_id=0,
        audio_token_id=40,
        audio_eos_token_id=41,
        depth_decoder_config={**small, **depth, **heads, "num_hidden_layers": 2},
        codec_config=codec.to_dict(),
    )
    torch.manual_seed(0)
    model = t.CsmForConditionalGeneration(config)
    model.generation_config.do_sample = model.depth_decoder.generation_config.do_sample = True
    model.save_pretrained(path)
    template = (
        "{% for message in messages %}[{{ message['role'] }}]"
        "{{ message['content'][0]['text'] }}{% endfor %}"
    )
    features = t.EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000)
    t.CsmProcessor(features, tokenizer, chat_template=template).save_pretrained(path)


def _generate_csm(model: Any, segment: Any) -> Any:
    """Synthesise a segment by the library's ``generate``, with its codec at the end."""
    said = [{"role": "0", "content": [{"type": "text", "text": segment.text}]}]
    inputs = model._processor.apply_chat_template(said, tokenize=True, return_dict=True)
    inner = model._model
    for each in (inner, inner.depth_decoder):
        each.generation_config.cache_implementation = None
    return inner.generate(
        **inputs, output_audio=True, max_new_tokens=model._codec.frames(segment.seconds)
    )[0]


MAKERS: Final = {"VITS": make_checkpoint, "CSM": make_csm}


def _samples(file: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.frombuffer(file[len(file) % 2 :], "<i2").astype(np.float32) / 32_768


def _p(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
