"""Compares the LLM engine with others: same weights, same prompts, same threads, in one run.

    make bench-llm        or: python -m benchmarks llm

Prompts of 20 to 200 tokens, 64 output tokens, greedy, float32. Rates are per second of processor
time, without that of the clients of runners that have their own threads. The runners alternate, and
the median is printed with the range of the ratios, because other load on the machine varies.
``BENCH_CHECKPOINT`` selects another checkpoint; ``BENCH_THREADS`` (1) and ``BENCH_REPEATS`` (2) set
threads and repetitions.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

POCKET: Final = Path(__file__).parents[1] / "workers" / "pocket" / "chat"
NEW: Final = 64
LOADS: Final = {1: 3, 8: 24, 32: 64}
"""Concurrency → number of requests."""
SHARE: Final = 0.6
"""Arrival rate relative to our throughput at concurrency 8."""
KINDS: Final = ("ours", "ours, library forward", "one by one", "static", "manager", "llama.cpp")


def main() -> None:
    threads = os.environ.get("BENCH_THREADS", "1")
    repeats = int(os.environ.get("BENCH_REPEATS", "2"))
    given = os.environ.get("BENCH_CHECKPOINT")
    with tempfile.TemporaryDirectory() as directory:
        pocket = _copy_without_end(Path(given or POCKET), Path(directory) / "first")
        _compare("the checkpoint" if given else "pocket-chat", pocket, threads, repeats)
        if given is None:
            wide = _widen(pocket, Path(directory) / "wide")
            _compare("random weights of 29 M parameters", wide, threads, repeats)


def _compare(name: str, path: Path, threads: str, repeats: int) -> None:
    print(f"\n{name}, {threads} thread(s), float32, greedy, load {os.getloadavg()[0]:.1f}")
    kinds = [kind for kind in KINDS if kind != "llama.cpp" or _has_llama()]
    tasks: list[dict[str, Any]] = [
        {"prompts": _prompts(path, requests), "new": NEW, "concurrency": concurrency}
        for concurrency, requests in LOADS.items()
    ]
    rates: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    texts: dict[str, Any] = {}
    for _ in range(repeats):
        for kind in kinds:
            mine = tasks if kind != "one by one" else tasks[:2]
            results = _run_process(kind, path, threads, mine)
            rates[kind].append(
                [
                    NEW * len(task["prompts"]) / answer["seconds"]
                    for task, answer in zip(mine, results, strict=True)
                ]
            )
            texts[kind] = [answer["texts"] for answer in results]
    print("  tokens/s at concurrency" + "".join(f"{c:>22}" for c in LOADS))
    for kind in kinds:
        print(f"  {kind:<22}" + "".join(_column(rates, kind, place) for place in range(len(LOADS))))
    if not _has_llama():
        print("  llama.cpp: not installed (pip install -e '.[peers]')")
    same = sum(a == b for a, b in zip(texts["ours"][1], texts["one by one"][1], strict=True))
    print(f"  texts equal to those of generate: {same} of {len(texts['ours'][1])}")
    _bandwidth(path, statistics.median(run[0] for run in rates["ours"]), threads)
    _arrivals(path, kinds, threads, statistics.median(run[1] for run in rates["ours"]))


def _column(rates: Mapping[str, list[list[float]]], kind: str, place: int) -> str:
    mine = [run[place] for run in rates[kind] if len(run) > place]
    if not mine:
        return f"{'-':>22}"
    cell = f"{statistics.median(mine):.0f}"
    if kind != "ours":
        ratios = [
            ours[place] / theirs[place]
            for ours, theirs in zip(rates["ours"], rates[kind], strict=True)
        ]
        cell += f" ({min(ratios):.2f}-{max(ratios):.2f} x)"
    return f"{cell:>22}"


def _arrivals(path: Path, kinds: Sequence[str], threads: str, capacity: float) -> None:
    """Measure Poisson arrivals at a rate below our capacity."""
    r = random.Random(2)
    times, now = [], 0.0
    for _ in range(40):
        now += r.expovariate(SHARE * capacity / NEW)
        times.append(now)
    task = {"prompts": _prompts(path, len(times)), "new": NEW, "times": times}
    print(f"  Poisson arrivals, {SHARE * capacity / NEW:.1f} requests/s, milliseconds p50 / p99")
    for kind in kinds:
        if kind in ("static", "ours, library forward"):
            continue
        (found,) = _run_process(kind, path, threads, [task])
        ttft, tpot = ([1000 * one[place] for one in found] for place in (0, 1))
        print(
            f"  {kind:<22} TTFT {_p(ttft, 50):8.1f} / {_p(ttft, 99):8.1f}"
            f"   TPOT {_p(tpot, 50):6.1f} / {_p(tpot, 99):6.1f}"
        )


def _bandwidth(path: Path, rate: float, threads: str) -> None:
    """Print the share of the memory bandwidth used at concurrency 1."""
    code = (
        "import torch, time; torch.set_num_threads(int(THREADS)); a = torch.zeros(1 << 26);"
        "b = torch.empty_like(a); b.copy_(a); t = time.perf_counter();"
        "[b.copy_(a) for _ in range(8)];"
        "print(8 * 2 * a.numel() * 4 / (time.perf_counter() - t))"
    ).replace("THREADS", threads)
    copied = float(subprocess.check_output([sys.executable, "-c", code]))
    config = json.loads((path / "config.json").read_text())
    file = path / "model.safetensors"
    size = 2 if config.get("dtype") == "bfloat16" else 4
    weights = file.stat().st_size / size * 4
    share = rate * weights / copied
    print(
        f"  one at a time reads {rate * weights / 1e9:.2f} GB/s of weights; a copy moves "
        f"{copied / 1e9:.1f} GB/s: {share:.1%}"
    )


def _run_process(
    kind: str, path: Path, threads: str, tasks: Sequence[Mapping[str, Any]]
) -> list[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.llm_runners", kind, str(path), threads],
        input=json.dumps(tasks).encode(),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr.decode()[-2000:]}")
    results: list[Any] = json.loads(done.stdout)
    return results


def _prompts(path: Path, count: int) -> list[list[int]]:
    """Return random prompts without special tokens, which are the first few."""
    r = random.Random(1)
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    return [[r.randrange(8, size - 8) for _ in range(r.randint(20, 200))] for _ in range(count)]


def _copy_without_end(source: Path, path: Path) -> Path:
    """Copy a checkpoint with an end token that it never generates."""
    path.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    never = tokenizer["added_tokens"][0]
    for name in ("config.json", "generation_config.json"):
        if (path / name).is_file():
            document = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(document | {"eos_token_id": never["id"]}))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"eos_token": never["content"]})
    )
    return path


def _widen(source: Path, path: Path) -> Path:
    """Create a larger model with random weights and the same tokenizer, to reduce the overhead."""
    import torch
    import transformers

    models: Any = transformers.AutoModelForCausalLM
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config: Any = transformers.AutoConfig.from_pretrained(source)
    config.update(
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 9,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "layer_types": ["full_attention"] * 9,
            "max_window_layers": 9,
        }
    )
    torch.manual_seed(0)
    model: Any = models.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(path)
    return path


def _has_llama() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "gguf"))


def _p(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - started:.0f} s")
