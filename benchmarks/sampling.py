"""Measures the sampling of a step alone: 64 rows of a vocabulary of 152,000, as large models have.

    python -m benchmarks sampling        BENCH_DEVICE=cuda for a GPU; BENCH_THREADS (1) for a CPU

Prints for each kind of request the milliseconds of a step until its tokens are on the host, and the
part of it that does not depend on the vocabulary: the same step with 64 words, which is what Python
and the launches of a GPU take. The goal on a GPU is 1 ms in total.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

ROWS: Final = 64
VOCABULARY: Final = 152_000
SMALL: Final = 64
REPEATS: Final = 15
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40": {"top_k": 40},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": True, "top_logprobs": 5},
}


def main() -> None:
    import torch

    device = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "1")))
    print(f"sampling {ROWS} rows of {VOCABULARY} words on {device}, load {os.getloadavg()[0]:.1f}")
    print(f"  {'kind':<16}{'ms a step':>12}{'ms a row':>12}{f'ms, {SMALL} words':>16}")
    with torch.inference_mode():
        for name, parameters in KINDS.items():
            whole, least = (
                _median_ms(_sampling(device, words, parameters)) for words in (VOCABULARY, SMALL)
            )
            print(f"  {name:<16}{whole:>12.2f}{whole / ROWS:>12.3f}{least:>16.2f}")


def _sampling(device: Any, words: int, parameters: dict[str, Any]) -> Callable[[], Any]:
    import torch

    from workers.contract.jobs import ChatInput
    from workers.engines.llm.sampling import Draw, Sampler, draw

    generator = torch.Generator().manual_seed(1)
    # As a language model's: most of the probability is that of few words.
    ranks = torch.stack([torch.randperm(words, generator=generator) for _ in range(ROWS)]) + 1
    logits = (-1.5 * ranks.float().log()).to(device)
    chat = ChatInput((), 1, **parameters)
    samplers = [Sampler(chat, prompt=range(20), seed=row) for row in range(ROWS)]
    draws = [Draw(sampler, row) for row, sampler in enumerate(samplers)]
    return lambda: draw(logits, draws)


def _median_ms(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
