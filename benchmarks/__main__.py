"""Runs the benchmarks on this machine: ``make bench``, or ``python -m benchmarks ledger``."""

from __future__ import annotations

import sys

from benchmarks import (
    audio,
    batches,
    compare,
    console,
    diffusion,
    gateway,
    ledger,
    llm,
    old,
    path,
    precision,
    sampling,
    sweep,
    usage,
    wide,
)

BENCHMARKS = {
    "ledger": ledger.main,
    "sweep": sweep.main,
    "usage": usage.main,
    "old": old.main,
    "wide": wide.main,
    "console": console.main,
    "gateway": gateway.main,
    "batches": batches.main,
    "compare": compare.measure_all,
    "path": lambda: path.main([]),
    "precision": precision.main,
    "llm": llm.main,
    "sampling": sampling.main,
    "diffusion": diffusion.main,
    "audio": audio.main,
}


def main() -> None:
    chosen = sys.argv[1:] or list(BENCHMARKS)
    for name in chosen:
        BENCHMARKS[name]()


main()
