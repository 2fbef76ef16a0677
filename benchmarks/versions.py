"""Compares this tree with another commit: processor time per request, measured by turns.

``python -m benchmarks.versions f6624ca [--rounds 4]`` runs both on this machine, with the echo
engine and before an instant upstream, and prints the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.load import Figures, chat_load
from benchmarks.processes import Product, free_port, roles, start_product

CONCURRENCY = (1, 8, 64)
MODELS = ("echo", "upstream")
SECONDS = 3.0
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Round:
    figures: Figures
    cpu_ms: dict[str, float]
    """Processor time per request, by role of the process."""

    @property
    def total_ms(self) -> float:
        return sum(self.cpu_ms.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=4)
    chosen = parser.parse_args()
    rounds: defaultdict[tuple[str, int, str], list[Round]] = defaultdict(list)
    with ExitStack() as stack:
        upstream = stack.enter_context(_upstream())
        products = {
            "before": stack.enter_context(_product(upstream, chosen.revision)),
            "after": stack.enter_context(_product(upstream, None)),
        }
        for number in range(chosen.rounds):
            # Each goes first in every second round, because a machine's clock drifts.
            order = list(products.items())[:: 1 if number % 2 else -1]
            for model in MODELS:
                for concurrency in CONCURRENCY:
                    for name, product in order:
                        each = _measure(product, model, concurrency)
                        rounds[model, concurrency, name].append(each)
    print(f"this tree beside {chosen.revision}: medians of {chosen.rounds} rounds by turns")
    print(
        f"{'model':<10}{'concurrency':>12}{'req/s':>16}{'p50 ms':>14}{'p99 ms':>16}"
        f"{'cpu ms/request':>18}{'ratio':>8}   gateway, agent, engine, queue"
    )
    for model in MODELS:
        for concurrency in CONCURRENCY:
            _print(model, concurrency, *(rounds[model, concurrency, name] for name in products))


def _print(model: str, concurrency: int, before: list[Round], after: list[Round]) -> None:
    def pair(value: str, digits: int) -> str:
        both = (median(getattr(one.figures, value) for one in each) for each in (before, after))
        return " > ".join(f"{one:,.{digits}f}" for one in both)

    ratio = median(new.total_ms / old.total_ms for old, new in zip(before, after, strict=True))
    parts = "  ".join(
        f"{median(one.cpu_ms[role] for one in before):.2f} > "
        f"{median(one.cpu_ms[role] for one in after):.2f}"
        for role in ("gateway", "agent", "engine", "queue")
    )
    totals = " > ".join(f"{median(one.total_ms for one in each):.2f}" for each in (before, after))
    print(
        f"{model:<10}{concurrency:>12}{pair('rate', 0):>16}{pair('p50_ms', 1):>14}"
        f"{pair('p99_ms', 1):>16}{totals:>18}{ratio:>8.2f}   {parts}"
    )


def _measure(product: Product, model: str, concurrency: int) -> Round:
    processes = roles(product)
    before = {pid: _ticks(pid) for pid in processes}
    figures = chat_load(
        port=product.port,
        key=product.key,
        model=model,
        concurrency=concurrency,
        seconds=SECONDS,
        path="/v1/chat/completions",
    )
    if figures.errors:
        raise RuntimeError(f"{figures.errors} of {figures.rate * SECONDS:.0f} requests failed")
    used: defaultdict[str, float] = defaultdict(float)
    for pid, role in processes.items():
        used[role] += (_ticks(pid) - before[pid]) * TICK_MS / (figures.rate * SECONDS)
    return Round(figures, used)


def _ticks(pid: int) -> int:
    """Return the processor time of a process, user and system, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@contextmanager
def _product(upstream_port: int, revision: str | None) -> Iterator[Product]:
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        tree = HERE
        if revision is not None:
            tree = Path(directory) / "tree"
            clone = ["git", "clone", "--quiet", "--no-checkout", str(HERE), str(tree)]
            subprocess.run(clone, check=True)
            subprocess.run(["git", "checkout", "--quiet", revision], cwd=tree, check=True)
        home = Path(directory) / "home"
        home.mkdir()
        product = start_product(home, None, upstream_port=upstream_port, tree=tree)
        try:
            chat_load(
                port=product.port,
                key=product.key,
                model="echo",
                concurrency=8,
                seconds=1,
                path="/v1/chat/completions",
            )
            yield product
        finally:
            product.stop()


@contextmanager
def _upstream() -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_upstream", str(port)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
