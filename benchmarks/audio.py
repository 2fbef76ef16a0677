"""Our speech engine beside the same model called one by one: real-time factor, first sound.

    make bench-audio        or: python -m benchmarks.audio [--checkpoint DIRECTORY]

So many requests are there at once, and all speak; then it is measured again with the next number.
Both play in this process, by turns, on weights read from the same directory, speak the same
sentences with the same seeds and end with the same file, so that what they say can be compared.
Without a checkpoint it is a small VITS of random weights.
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
"""By how much the sound may differ in float32, of a range from -1 to 1."""


@dataclass(slots=True)
class Played:
    """Seconds; ``first_s`` and ``whole_s`` by the number of the request, from their beginning."""

    first_s: dict[int, float] = field(default_factory=dict)
    whole_s: dict[int, float] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    spoken_s: float = 0.0
    """Of sound."""
    makespan_s: float = 0.0


class Player(Protocol):
    def play(self, requests: int) -> Played:
        """Speak so many requests that are all there now; a request's number is its seed."""
        ...


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audio")
    parser.add_argument("--checkpoint", type=Path, help="a directory that the engine can speak")
    parser.add_argument("--voices", type=json.loads, default={}, help="of its entry, as JSON")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="on one thread of a busy machine: time is what this process computes",
    )
    given = parser.parse_args(arguments)
    if given.processor_time and given.threads > 1:
        parser.error("--processor-time is for one thread")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    if given.checkpoint is not None:
        _compare(str(given.checkpoint.name), given.checkpoint, given)
        return
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory))
        _compare("VITS of random weights", Path(directory), given)


def _compare(name: str, checkpoint: Path, given: argparse.Namespace) -> None:
    now_s = time.process_time if given.processor_time else time.perf_counter
    options = {
        "threads": given.threads,
        "slots": max(given.together),
        "voices": given.voices,
        "device": "cpu",
    }
    playing: dict[str, Player] = {
        OURS: Ours(checkpoint, options, now_s),
        ALONE: OneByOne(checkpoint, options, now_s),
    }
    print(
        f"\n{name}: float32, {given.threads} thread(s), load {os.getloadavg()[0]:.1f}"
        + (", in processor time" if given.processor_time else "")
    )
    for player in playing.values():
        player.play(1)
    for together in given.together:
        played: dict[str, list[Played]] = {kind: [] for kind in playing}
        for _ in range(given.repeats):
            for kind, player in playing.items():
                played[kind].append(player.play(together))
        _tell(together, played)
        _check_agreement(played)


def _tell(together: int, played: Mapping[str, Sequence[Played]]) -> None:
    print(
        f"  {together} together{'':<14}{'real-time factor':>24}{'first sound p50 / p95 ms':>28}"
        f"{'whole p50 / p95 ms':>28}"
    )
    for kind, runs in played.items():
        factors = [run.makespan_s / run.spoken_s for run in runs]
        told = f"{statistics.median(factors):.4f}"
        if kind != OURS:
            ratios = [
                run.makespan_s / ours.makespan_s
                for run, ours in zip(runs, played[OURS], strict=True)
            ]
            told += f" ({min(ratios):.2f}-{max(ratios):.2f} x)"
        line = f"    {kind:<20}{told:>26}"
        for times in ([run.first_s for run in runs], [run.whole_s for run in runs]):
            found = sorted(1000 * value for by_number in times for value in by_number.values())
            line += f"{f'{_p(found, 50):.0f} / {_p(found, 95):.0f}':>28}"
        print(line)


def _check_agreement(played: Mapping[str, Sequence[Played]]) -> None:
    worst = 0.0
    for number, file in played[ALONE][0].files.items():
        wanted = _samples(file)
        for found in (_samples(run.files[number]) for runs in played.values() for run in runs):
            if found.shape != wanted.shape:
                raise RuntimeError(f"request {number} was spoken at another length")
            worst = max(worst, float(abs(found - wanted).max()))
    print(f"    largest difference of the sound: {worst:.1e}; at most {SAME} is asked")
    if worst > SAME:
        raise RuntimeError("the players did not say the same")


class Ours:
    """The step loop and the engine, as a worker runs them, read along."""

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

    def play(self, requests: int) -> Played:
        import msgspec

        from workers.contract.jobs import AudioChunk, Completed, Job, RequestId
        from workers.contract.media import SpeechInput

        played, began_s = Played(), self._now_s()
        for number in range(requests):
            asked = msgspec.to_builtins(SpeechInput(TEXT, seed=number, format="wav"))
            job = Job(RequestId(str(number)), "1", MODEL, "text-to-speech", asked, stream=True)
            self._loop.admit(job, queue_us=0, leased_us=round(1e6 * began_s))
        while len(played.whole_s) < requests:
            report = self._loop.turn()
            after_s = self._now_s() - began_s
            for id, event in report.events:
                if isinstance(event, AudioChunk) and event.duration_ms:
                    played.first_s.setdefault(int(id), after_s)
            for id, outcome in report.outcomes:
                if not isinstance(outcome, Completed):
                    raise RuntimeError(f"request {id} ended as {outcome}")
                played.whole_s[int(id)] = after_s
                played.files[int(id)] = outcome.files[0].data
                played.spoken_s += outcome.usage.audio_ms / 1000
        played.makespan_s = self._now_s() - began_s
        return played


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
        self._talker = family.load(checkpoint, read)
        self._voice = Voice()
        for name, given in read.voices.items():
            rate = self._talker.recording_rate
            self._voice = read_voice(name, given, root=checkpoint, rate=rate, limits=read)
            break
        most = read.sentence_characters or family.sentence_characters
        self._sentences = Language(read.languages[0]).sentences(TEXT, most=most)
        self._seconds, self._pause_ms = read.sentence_seconds, read.pause_ms

    def play(self, requests: int) -> Played:
        played, began_s = Played(), self._now_s()
        for number in range(requests):
            self._speak(number, played, began_s)
            played.whole_s[number] = self._now_s() - began_s
        played.makespan_s = self._now_s() - began_s
        return played

    def _speak(self, number: int, played: Played, began_s: float) -> None:
        import numpy as np
        import torch

        from workers.engines.speech.model import Segment
        from workers.media.audio import encode_audio
        from workers.media.crossfade import Crossfader
        from workers.media.encode import Origin
        from workers.media.pixels import Audio

        joiner = Crossfader(self._talker.rate, pause_ms=self._pause_ms)
        heard: list[Any] = []
        for place, sentence in enumerate(self._sentences):
            mixed = np.random.SeedSequence((number, place))
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0]))
            said: list[Any] = []
            with torch.no_grad():
                self._talker.speak(Segment(sentence, self._voice, self._seconds), said.append)
            for piece in said:
                heard.append(joiner.add(piece.float().numpy().reshape(-1).clip(-1, 1)))
                played.first_s.setdefault(number, self._now_s() - began_s)
            heard.append(joiner.cut())
        sound = np.concatenate([*heard, joiner.finish()])
        origin = Origin(MODEL, str(number), number)
        audio = Audio(sound[None], self._talker.rate)
        played.files[number] = encode_audio(audio, "wav", origin=origin)
        played.spoken_s += len(sound) / self._talker.rate


def make_checkpoint(path: Path) -> None:
    """A VITS of 16 kHz with random weights, a tenth of the published ones' size."""
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
        speaking_rate=3.0,  # as long as if somebody spoke
    )
    torch.manual_seed(0)
    t.VitsModel(config).save_pretrained(path)
    vocabulary = path / "vocabulary.json"
    vocabulary.write_text(json.dumps({letter: place for place, letter in enumerate(letters)}))
    t.VitsTokenizer(
        str(vocabulary), pad_token="_", unk_token="-", phonemize=False, language="eng"
    ).save_pretrained(path)


def _samples(file: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.frombuffer(file[len(file) % 2 :], "<i2").astype(np.float32) / 32_768


def _p(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
