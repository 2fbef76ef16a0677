"""Compares the diffusion engine with its pipeline, one request at a time and in batches of
requests.

    make bench-diffusion        or: python -m benchmarks.diffusion [--gpu] [--checkpoint DIRECTORY]

Requests of few and of many steps arrive mixed, as a Poisson process, at a rate that keeps the
one-by-one pipeline busy for ``SHARE`` of the time; then all at once. Every runner receives the same
requests at the same times and generates each with the same seed, so that the images can be
compared. Default model: a small one with random weights in Stable Diffusion's shape.
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
    from benchmarks.diffusion_runners import Arrival, Runner, RunResult, Setting

POCKET: Final = Path(__file__).parents[1] / "workers" / "pocket" / "image"
SHORT_SHARE: Final = 0.6
"""Share of requests with few steps."""
SHARE: Final = 0.85
"""Arrival rate relative to the throughput of the one-by-one pipeline."""
SAME: Final = 1e-3
"""Maximum difference of images in float32, with values from 0 to 1."""
STEP_US: Final = 20_000
"""Reference duration of a step for the loop's own time."""
OURS, ALONE, WHOLE = "ours", "one by one", "whole requests"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diffusion")
    parser.add_argument("--checkpoint", type=Path, help="directory in diffusers' format")
    parser.add_argument("--gpu", action="store_true", help="run on CUDA, in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--together", type=int, default=8, help="maximum batch size")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--short", type=int, default=4, help="steps of the short requests")
    parser.add_argument("--long", type=int, default=30, help="steps of the long requests")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time instead of wall time; for one thread on a busy machine",
    )
    given = parser.parse_args(arguments)
    if given.processor_time and (given.gpu or given.threads > 1):
        parser.error("--processor-time is for one thread of the CPU")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    from benchmarks.diffusion_checkpoint import make_checkpoint

    if given.gpu and not _has_cuda():
        print("\ndiffusion on a GPU: skipped, no GPU found")
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
    from benchmarks.diffusion_runners import Arrival, Ours, Pipeline, Setting
    from workers.engines.diffusion import families

    setting = Setting(
        checkpoint=checkpoint,
        together=given.together,
        device="cuda" if given.gpu else "cpu",
        dtype="bfloat16" if given.gpu else "float32",
        threads=given.threads,
        processor_time=given.processor_time,
    )
    alone = Pipeline(setting, together=1)
    runners: dict[str, Runner] = {OURS: Ours(setting), ALONE: alone}
    own_kind = type(alone.pipeline).__module__.startswith("workers.")
    if not own_kind:
        runners[WHOLE] = Pipeline(setting, together=given.together)
    weights = sum(
        weight.numel()
        for part in (*families.DENOISERS, *families.ENCODERS, "vae")
        if (module := getattr(alone.pipeline, part, None)) is not None
        for weight in module.parameters()
    )
    print(
        f"\n{name}: {weights / 1e6:.1f} M weights, {setting.device}, {setting.dtype}, "
        f"{setting.threads} thread(s), batches of up to {setting.together}, "
        f"load {os.getloadavg()[0]:.1f}" + (", in processor time" if setting.processor_time else "")
    )
    if own_kind:
        print(f"  {WHOLE}: skipped, this pipeline takes one prompt per call")
    short_s, long_s = _calibrate(alone, runners, given.short, given.long)
    rate = SHARE / (SHORT_SHARE * short_s + (1 - SHORT_SHARE) * long_s)
    print(
        f"  alone: {given.short} steps {1000 * short_s:.0f} ms, {given.long} steps "
        f"{1000 * long_s:.0f} ms"
    )
    _print_concatenation(alone, setting)
    _print_overhead(alone, setting, given.long)
    arrivals = _arrivals(given.requests, rate, short=given.short, long=given.long)
    burst = [Arrival(each.number, each.prompt, each.steps, 0.0) for each in arrivals]
    print(f"  {len(arrivals)} Poisson arrivals, {rate:.2f} per second, {given.repeats} time(s)")
    arrived = _run_all(runners, arrivals, given.repeats)
    print("  the same requests, all at once")
    at_once = _run_all(runners, burst, given.repeats)
    _check_agreement(arrived, at_once, setting)


def _calibrate(
    alone: Any, runners: Mapping[str, Runner], short: int, long: int
) -> tuple[float, float]:
    """Measure a short and a long request alone, in seconds, after a warm-up of all runners."""
    from benchmarks.diffusion_runners import Arrival

    for runner in runners.values():
        runner.run([Arrival(number, "a red circle", short, 0.0) for number in range(2)])
    took = [
        [alone.run([Arrival(0, "a red circle", steps, 0.0)]).makespan_s for steps in (short, long)]
        for _ in range(3)
    ]
    short_s, long_s = (statistics.median(column) for column in zip(*took, strict=True))
    return short_s, long_s


def _run_all(
    runners: Mapping[str, Runner], arrivals: Sequence[Arrival], repeats: int
) -> dict[str, list[RunResult]]:
    """Run and print. The runners alternate, so that other load on the machine affects all of
    them."""
    result: dict[str, list[RunResult]] = {kind: [] for kind in runners}
    for _ in range(repeats):
        for kind, runner in runners.items():
            result[kind].append(runner.run(arrivals))
    _print_results(result, arrivals)
    return result


def _arrivals(count: int, rate: float, *, short: int, long: int) -> list[Arrival]:
    from benchmarks.diffusion_checkpoint import WORDS
    from benchmarks.diffusion_runners import Arrival

    r = random.Random(1)
    few = round(SHORT_SHARE * count)
    steps = [short] * few + [long] * (count - few)
    r.shuffle(steps)
    arrivals, now = [], 0.0
    for number, wanted in enumerate(steps):
        arrivals.append(Arrival(number, " ".join(r.sample(WORDS, 4)), wanted, now))
        now += r.expovariate(rate)
    return arrivals


def _print_results(result: Mapping[str, Sequence[RunResult]], arrivals: Sequence[Arrival]) -> None:
    kinds = sorted({arrival.steps for arrival in arrivals})
    heads = "".join(f"{f'{steps} steps p50 / p95 ms':>28}" for steps in kinds)
    print(
        f"    {'':<16}{heads}{'images/s':>22}{'makespan':>10}{'busy':>7}{'batch':>7}"
        f"{'processor':>24}"
    )
    for name, runs in result.items():
        line = f"    {name:<16}"
        for steps in kinds:
            mine = [
                1000 * run.latency_s[arrival.number]
                for run in runs
                for arrival in arrivals
                if arrival.steps == steps
            ]
            line += f"{f'{_p(mine, 50):.0f} / {_p(mine, 95):.0f}':>28}"
        rates = [len(arrivals) / run.makespan_s for run in runs]
        ratios = [
            run.makespan_s / ours.makespan_s for run, ours in zip(runs, result[OURS], strict=True)
        ]
        cell = f"{statistics.median(rates):.2f}"
        if name != OURS:
            cell += f" ({min(ratios):.2f}-{max(ratios):.2f} x)"
        makespan_s = statistics.median(run.makespan_s for run in runs)
        busy = sum(run.busy_s for run in runs) / sum(run.makespan_s for run in runs)
        batch = statistics.mean(size for run in runs for size in run.batches)
        processor_ms = [1000 * run.processor_s / len(arrivals) for run in runs]
        used = f"{statistics.median(processor_ms):.0f} ms each"
        if name != OURS:
            mine_s = sum(run.processor_s for run in result[OURS])
            used += f" ({sum(run.processor_s for run in runs) / mine_s:.2f} x)"
        print(f"{line}{cell:>22}{makespan_s:>8.1f} s{busy:>7.0%}{batch:>7.1f}{used:>24}")


def _check_agreement(
    arrived: Mapping[str, Sequence[RunResult]],
    at_once: Mapping[str, Sequence[RunResult]],
    setting: Setting,
) -> None:
    reference = arrived[ALONE][0].images
    worst = max(
        float(abs(image - reference[number]).max())
        for runs in (arrived, at_once)
        for every in runs.values()
        for run in every
        for number, image in run.images.items()
    )
    aim = f"; the limit is {SAME}" if setting.dtype == "float32" else ""
    print(f"  largest difference between images of one seed: {worst:.1e}{aim}")
    if setting.dtype == "float32" and worst > SAME:
        raise RuntimeError("the images of the runners differ")


def _print_concatenation(alone: Any, setting: Setting, *, rounds: int = 12) -> None:
    """Compare a batch concatenated from several calls with one call of the same rows."""
    from benchmarks.diffusion_steps import concatenated_and_plain_s

    concatenated, plain, rows = concatenated_and_plain_s(alone, setting, rounds=rounds)
    ratio = statistics.median(b / a for a, b in zip(concatenated, plain, strict=True))
    print(
        f"  a forward of {rows} rows: concatenated {1000 * min(concatenated):.1f} ms, plain "
        f"{1000 * min(plain):.1f} ms; efficiency {min(plain) / min(concatenated):.1%} "
        f"(median of pairs {ratio:.1%})"
    )


def _print_overhead(alone: Any, setting: Setting, steps: int) -> None:
    """Print the time of a step that is neither the forward pass nor the pipelines' own code."""
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

    started = time.perf_counter()
    main(sys.argv[1:])
    print(f"\n{time.perf_counter() - started:.0f} s")
