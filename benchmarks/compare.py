"""Compares this tree with earlier commits and other proxies, measured by turns on this machine.

``python -m benchmarks.compare [CONTENDER ...] [--rounds 3]``; a contender is ``portkey``,
``litellm`` or a revision of this repository. The same client sends the same chat to each of them,
and all stand before the same instant upstream. Processor time is that of their own processes:
neither the client's nor the upstream's. Prints medians of the rounds as Markdown; ratios are
medians of each round's own ratio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks.contenders import HERE, PEERS, THIS_TREE, Contender, contenders
from benchmarks.load import Figures, chat_load
from benchmarks.processes import Consumption, consumption

CONCURRENCY: Final = (1, 8, 64)
MODELS: Final = ("echo", "upstream")
SECONDS: Final = 3.0
BASELINE: Final = "f6624ca"
"""The last commit before the work on the cost of a request."""
STREAMS: Final = 64
TOKENS: Final = 128
"""Tokens of each measured stream."""


@dataclass(frozen=True)
class Sample:
    figures: Figures
    used: Consumption
    """Consumption per request."""

    @property
    def cpu_ms(self) -> float:
        return sum(self.used.cpu_ms.values())

    @property
    def wakeups(self) -> float:
        return sum(self.used.wakeups.values())


Samples = defaultdict[tuple[str, int, str], list[Sample]]
"""By model, concurrency and contender: one of each round."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", help="portkey, litellm or a revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--streams", action="store_true", help="measure streams as well")
    chosen = parser.parse_args(arguments)
    samples: Samples = defaultdict(list)
    frames: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    with contenders(chosen.contenders) as started:
        for number in range(chosen.rounds):
            # The order alternates, because the machine's clock drifts.
            order = started[:: 1 if number % 2 else -1]
            for model in MODELS:
                for concurrency in CONCURRENCY:
                    for each in order:
                        if each.has_engines or model == "upstream":
                            sample = _measure(each, model, concurrency, chosen.seconds)
                            samples[model, concurrency, each.name].append(sample)
            if chosen.streams:
                for each in order:
                    if each.has_engines:
                        frames[each.name].append(_frame(each, chosen.seconds))
        names = [each.name for each in started]
    print(f"\nmedians of {chosen.rounds} rounds of {chosen.seconds:g} s, by turns\n")
    _print_figures(samples, names)
    _print_ratios(samples, names)
    if frames:
        _print_frames(frames)


def measure_all() -> None:
    """Compare with the baseline and every peer: part of ``make bench``."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{BASELINE}^{{commit}}"], cwd=HERE, stderr=subprocess.DEVNULL
    )
    # A source archive has no earlier commits.
    earlier = [] if known.returncode else [BASELINE]
    main([*earlier, *PEERS, "--streams"])


def _measure(
    contender: Contender, model: str, concurrency: int, seconds: float, **load: object
) -> Sample:
    processes = contender.processes()
    before = consumption(processes)
    figures = chat_load(
        port=contender.port,
        key=contender.key,
        headers=contender.headers,
        model=model,
        concurrency=concurrency,
        seconds=seconds,
        **load,  # type: ignore[arg-type]
    )
    if figures.errors:
        raise RuntimeError(f"{contender.name}: {figures.errors} of {figures.count} requests failed")
    return Sample(figures, consumption(processes).since(before, figures.count))


def _frame(contender: Contender, seconds: float) -> tuple[float, float]:
    """Measure ``STREAMS`` concurrent streams.

    Return the gateway's processor time per token frame in microseconds, without what the request
    itself costs, and the time to first token in milliseconds less that of an unstreamed answer of
    one token.
    """
    long = _measure(contender, "streamed", STREAMS, seconds, words=TOKENS, stream=True)
    short = _measure(contender, "streamed", STREAMS, seconds, words=1, stream=True)
    extra_ms = long.used.cpu_ms["gateway"] - short.used.cpu_ms["gateway"]
    frames = (long.figures.frames - long.figures.count) / long.figures.count
    streamed = _measure(contender, "echo", 1, seconds, stream=True)
    whole = _measure(contender, "echo", 1, seconds)
    return extra_ms / frames * 1000, streamed.figures.first_p50_ms - whole.figures.p50_ms


def _print_figures(samples: Samples, names: list[str]) -> None:
    for model in MODELS:
        print(
            f"| {model}: concurrency | | requests/s | p50 ms | p99 ms | wake-ups | CPU ms | of it |"
        )
        print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |")
        for concurrency in CONCURRENCY:
            for name in names:
                if found := samples.get((model, concurrency, name)):
                    print(f"| {concurrency} | {name} | {_row(found)} |")
        print()


def _row(samples: list[Sample]) -> str:
    def middle(value: Callable[[Sample], float]) -> float:
        return median(map(value, samples))

    parts = " + ".join(
        f"{median(each.used.cpu_ms[role] for each in samples):.2f} {role}"
        for role in samples[0].used.cpu_ms
    )
    return (
        f"{middle(lambda one: one.figures.rate):,.0f} | "
        f"{middle(lambda one: one.figures.p50_ms):.1f} | "
        f"{middle(lambda one: one.figures.p99_ms):.1f} | "
        f"{middle(lambda one: one.wakeups):.1f} | "
        f"{middle(lambda one: one.cpu_ms):.2f} | {parts}"
    )


def _print_ratios(samples: Samples, names: list[str]) -> None:
    print("| this tree | beside | " + " | ".join(map(str, CONCURRENCY)) + " |")
    print("| --- | --- |" + " ---: |" * len(CONCURRENCY))
    for other in names[1:]:
        for model in MODELS:
            # Other proxies have no engine: echo is compared with what they do before an upstream.
            theirs = model if (model, CONCURRENCY[0], other) in samples else "upstream"
            for what, ratio in (("requests/s", _rate), ("processor time", _cpu)):
                cells = " | ".join(
                    f"{median(_ratios(samples, model, theirs, concurrency, other, ratio)):.2f}"
                    for concurrency in CONCURRENCY
                )
                print(f"| {model}, {what} | {other} | {cells} |")
    print()


def _ratios(
    samples: Samples,
    model: str,
    theirs: str,
    concurrency: int,
    other: str,
    value: Callable[[Sample], float],
) -> Iterator[float]:
    ours = samples[model, concurrency, THIS_TREE]
    for mine, yours in zip(ours, samples[theirs, concurrency, other], strict=True):
        yield value(mine) / value(yours)


def _rate(sample: Sample) -> float:
    return sample.figures.rate


def _cpu(sample: Sample) -> float:
    return sample.cpu_ms


def _print_frames(frames: dict[str, list[tuple[float, float]]]) -> None:
    print(
        f"| {STREAMS} streams of {TOKENS} tokens | gateway's µs per token frame | "
        "first token at 1, ms beside an unstreamed answer |"
    )
    print("| --- | ---: | ---: |")
    for name, measured in frames.items():
        cost, first = (median(values) for values in zip(*measured, strict=True))
        print(f"| {name} | {cost:.0f} | {first:+.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
