"""Our diffusion engine beside its pipeline, one request at a time and whole requests together.

    make bench-diffusion        or: python -m benchmarks.diffusion [--gpu] [--checkpoint DIRECTORY]

Requests of few and of many steps come mixed, by chance (Poisson), at a rate that keeps a machine
that draws one at a time busy for ``SHARE`` of its time; then all at once. Every player gets the
same requests at the same times, and draws each with the same seed, so that the pictures can be
compared. Without a checkpoint it is a small model of random weights in Stable Diffusion's shape.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.diffusion_players import Ask, Played, Player, Setting

POCKET: Final = Path(__file__).parents[1] / "workers" / "pocket" / "image"
SHORT_SHARE: Final = 0.6
"""Of the requests, how many are of few steps."""
SHARE: Final = 0.85
"""Of what the pipeline does one by one, how much arrives."""
SAME: Final = 1e-3
"""By how much pictures may differ in float32, of a range from 0 to 1."""
STEP_US: Final = 20_000
"""The step against which the loop's own time is held."""
OURS, ALONE, WHOLE = "ours", "one by one", "whole requests"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diffusion")
    parser.add_argument("--checkpoint", type=Path, help="a directory in diffusers' format")
    parser.add_argument("--gpu", action="store_true", help="on CUDA, in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--together", type=int, default=8, help="pictures at a time, at most")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--short", type=int, default=4, help="steps of the short requests")
    parser.add_argument("--long", type=int, default=30, help="steps of the long requests")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="on one thread of a busy machine: time is what this process computes",
    )
    given = parser.parse_args(arguments)
    if given.processor_time and (given.gpu or given.threads > 1):
        parser.error("--processor-time is for one thread of the CPU")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    from benchmarks.diffusion_checkpoint import make_checkpoint

    if given.gpu and not _has_cuda():
        print("\ndiffusion on a GPU: skipped, there is none")
        return
    if given.checkpoint is not None:
        _compare(str(given.checkpoint.name), given.checkpoint, given)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory))
        _compare("random weights in Stable Diffusion's shape", path, given)
    if (POCKET / "model_index.json").is_file():
        _compare("pocket-image", POCKET, given)


def _compare(name: str, checkpoint: Path, given: argparse.Namespace) -> None:
    from benchmarks import diffusion_players as players
    from workers.engines.diffusion import families

    setting = players.Setting(
        checkpoint=checkpoint,
        together=given.together,
        device="cuda" if given.gpu else "cpu",
        dtype="bfloat16" if given.gpu else "float32",
        threads=given.threads,
        processor_time=given.processor_time,
    )
    alone = players.Pipeline(setting, together=1)
    playing: dict[str, Player] = {OURS: players.Ours(setting), ALONE: alone}
    own_kind = type(alone.pipeline).__module__.startswith("workers.")
    if not own_kind:
        playing[WHOLE] = players.Pipeline(setting, together=given.together)
    weights = sum(
        weight.numel()
        for part in (*families.DENOISERS, *families.ENCODERS, "vae")
        if (module := getattr(alone.pipeline, part, None)) is not None
        for weight in module.parameters()
    )
    print(
        f"\n{name}: {weights / 1e6:.1f} M weights, {setting.device}, {setting.dtype}, "
        f"{setting.threads} thread(s), at most {setting.together} together, "
        f"load {os.getloadavg()[0]:.1f}" + (", in processor time" if setting.processor_time else "")
    )
    if own_kind:
        print(f"  {WHOLE}: skipped, this pipeline draws one prompt a call")
    short_s, long_s = _calibrate(alone, playing, given.short, given.long)
    rate = SHARE / (SHORT_SHARE * short_s + (1 - SHORT_SHARE) * long_s)
    print(
        f"  alone: {given.short} steps {1000 * short_s:.0f} ms, {given.long} steps "
        f"{1000 * long_s:.0f} ms"
    )
    _tell_fusing(alone, setting)
    _tell_overhead(alone, setting, given.long)
    asks = _arrivals(given.requests, rate, short=given.short, long=given.long)
    burst = [players.Ask(ask.number, ask.prompt, ask.steps, 0.0) for ask in asks]
    print(f"  {len(asks)} arrivals by chance, {rate:.2f} a second, {given.repeats} time(s)")
    arrived = _play(playing, asks, given.repeats)
    print("  the same all at once")
    heaped = _play(playing, burst, given.repeats)
    _tell_agreement(arrived, heaped, setting)


def _calibrate(
    alone: Any, playing: Mapping[str, Player], short: int, long: int
) -> tuple[float, float]:
    """Seconds of a short and of a long request alone, after everybody has drawn once."""
    from benchmarks.diffusion_players import Ask

    for player in playing.values():
        player.play([Ask(number, "a red circle", short, 0.0) for number in range(2)])
    took = [
        [alone.play([Ask(0, "a red circle", steps, 0.0)]).makespan_s for steps in (short, long)]
        for _ in range(3)
    ]
    short_s, long_s = (statistics.median(column) for column in zip(*took, strict=True))
    return short_s, long_s


def _play(
    playing: Mapping[str, Player], asks: Sequence[Ask], repeats: int
) -> dict[str, list[Played]]:
    """By turns, so that whatever else the machine does comes to all of them; and tell of it."""
    played: dict[str, list[Played]] = {kind: [] for kind in playing}
    for _ in range(repeats):
        for kind, player in playing.items():
            played[kind].append(player.play(asks))
    _tell(played, asks)
    return played


def _arrivals(count: int, rate: float, *, short: int, long: int) -> list[Ask]:
    from benchmarks.diffusion_checkpoint import WORDS
    from benchmarks.diffusion_players import Ask

    r = random.Random(1)
    few = round(SHORT_SHARE * count)
    steps = [short] * few + [long] * (count - few)
    r.shuffle(steps)
    asks, now = [], 0.0
    for number, wanted in enumerate(steps):
        asks.append(Ask(number, " ".join(r.sample(WORDS, 4)), wanted, now))
        now += r.expovariate(rate)
    return asks


def _tell(played: Mapping[str, Sequence[Played]], asks: Sequence[Ask]) -> None:
    kinds = sorted({ask.steps for ask in asks})
    heads = "".join(f"{f'{steps} steps p50 / p95 ms':>28}" for steps in kinds)
    print(
        f"    {'':<16}{heads}{'pictures/s':>22}{'makespan':>10}{'busy':>7}{'batch':>7}"
        f"{'processor':>24}"
    )
    for name, runs in played.items():
        line = f"    {name:<16}"
        for steps in kinds:
            mine = [
                1000 * run.latency_s[ask.number]
                for run in runs
                for ask in asks
                if ask.steps == steps
            ]
            line += f"{f'{_p(mine, 50):.0f} / {_p(mine, 95):.0f}':>28}"
        rates = [len(asks) / run.makespan_s for run in runs]
        ratios = [
            run.makespan_s / ours.makespan_s for run, ours in zip(runs, played[OURS], strict=True)
        ]
        told = f"{statistics.median(rates):.2f}"
        if name != OURS:
            told += f" ({min(ratios):.2f}-{max(ratios):.2f} x)"
        makespan_s = statistics.median(run.makespan_s for run in runs)
        busy = sum(run.busy_s for run in runs) / sum(run.makespan_s for run in runs)
        batch = statistics.mean(size for run in runs for size in run.batches)
        processor_ms = [1000 * run.processor_s / len(asks) for run in runs]
        used = f"{statistics.median(processor_ms):.0f} ms each"
        if name != OURS:
            mine_s = sum(run.processor_s for run in played[OURS])
            used += f" ({sum(run.processor_s for run in runs) / mine_s:.2f} x)"
        print(f"{line}{told:>22}{makespan_s:>8.1f} s{busy:>7.0%}{batch:>7.1f}{used:>24}")


def _tell_agreement(
    arrived: Mapping[str, Sequence[Played]],
    heaped: Mapping[str, Sequence[Played]],
    setting: Setting,
) -> None:
    reference = arrived[ALONE][0].pictures
    worst = max(
        float(abs(picture - reference[number]).max())
        for runs in (arrived, heaped)
        for every in runs.values()
        for run in every
        for number, picture in run.pictures.items()
    )
    aim = f"; at most {SAME} is asked" if setting.dtype == "float32" else ""
    print(f"  largest difference between anybody's pictures of one seed: {worst:.1e}{aim}")
    if setting.dtype == "float32" and worst > SAME:
        raise RuntimeError("the players did not draw the same pictures")


def _tell_fusing(alone: Any, setting: Setting, *, rounds: int = 12) -> None:
    """One batch made of several calls, beside one forward of the same rows made beforehand."""
    from benchmarks.diffusion_steps import fused_and_plain_s

    fused, plain, rows = fused_and_plain_s(alone, setting, rounds=rounds)
    ratio = statistics.median(b / a for a, b in zip(fused, plain, strict=True))
    print(
        f"  a forward of {rows} rows: fused {1000 * min(fused):.1f} ms, plain "
        f"{1000 * min(plain):.1f} ms; fused reaches {min(plain) / min(fused):.1%} of it "
        f"(median of pairs {ratio:.1%})"
    )


def _tell_overhead(alone: Any, setting: Setting, steps: int) -> None:
    """What is left of a step without the forward and the pipelines' own code."""
    from benchmarks.diffusion_steps import step_parts

    for count in dict.fromkeys((1, setting.together)):
        parts = step_parts(alone, setting, requests=count, steps=steps)
        step, forward, own = (
            1e6 * statistics.median(column) for column in zip(*parts, strict=True)
        )
        rest = 1e6 * statistics.median(a - b - c for a, b, c in parts)
        print(
            f"  a step of {count} request(s): {step / 1000:.1f} ms, of which forward "
            f"{forward / 1000:.1f}, the pipelines' own code {own / 1000:.2f}, the loop "
            f"{rest / 1000:.2f} ({rest / step:.1%}; of a step of {STEP_US // 1000} ms "
            f"{rest / STEP_US:.1%})"
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _p(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


if __name__ == "__main__":
    import sys

    began = time.perf_counter()
    main(sys.argv[1:])
    print(f"\n{time.perf_counter() - began:.0f} s")
