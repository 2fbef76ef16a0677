"""Counts the functions of ours that one request runs through, in each process: fewer is better.

``python -m benchmarks.functions [--list] [MODEL]`` traces an unstreamed chat. A function counts if
each of several requests calls it, so periodic tasks do not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import httpx

from benchmarks.processes import Product, roles, start_product

REQUESTS = 8
WAIT_S = 30.0
TRACING = Path(__file__).parent / "tracing"
CHAT = f"""\
  - name: pocket-chat
    task: text-generation
    engine: llm
    checkpoint: {Path(__file__).parents[1] / "workers/pocket/chat"}
    options: {{dtype: float32, slots: 8}}
    limits: {{context_tokens: 1024, output_tokens: 64, choices: 1}}
    price:
      - {{unit: input_token, amount: "0.0000001"}}
      - {{unit: output_token, amount: "0.0000001"}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pocket-chat")
    parser.add_argument("--list", action="store_true", help="name the functions")
    chosen = parser.parse_args()
    called = count(chosen.model)
    for role, names in called.items():
        files = {name.partition(":")[0] for name in names}
        print(f"{role:<10}{len(names):>5} functions in {len(files)} modules")
        if chosen.list:
            print(*(f"    {name}" for name in sorted(names)), sep="\n")
    print(f"{'together':<10}{sum(map(len, called.values())):>5}")


def count(model: str) -> dict[str, set[str]]:
    """Return the functions that a chat with a model calls, by process."""
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        home = Path(directory)
        path = os.pathsep.join([str(TRACING), str(TRACING.parents[1])])
        with mock.patch.dict(os.environ, {"PYTHONPATH": path, "PYTHONTRACEFOLDER": directory}):
            product = start_product(home, None, models=CHAT)
        try:
            processes = {pid: role for pid, role in roles(product).items() if role != "queue"}
            _ask(product, model)
            rounds = [_record(product, model, processes, home) for _ in range(REQUESTS)]
        finally:
            product.stop()
    return {role: set.intersection(*(each[role] for each in rounds)) for role in rounds[0]}


def _record(
    product: Product, model: str, processes: dict[int, str], folder: Path
) -> dict[str, set[str]]:
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    time.sleep(0.3)
    _ask(product, model)
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    called: defaultdict[str, set[str]] = defaultdict(set)
    for pid, role in processes.items():
        file = folder / f"{pid}.json"
        deadline = time.monotonic() + WAIT_S
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{role} wrote no trace")
            time.sleep(0.05)
        called[role] |= set(json.loads(file.read_text()))
        file.unlink()
    return called


def _ask(product: Product, model: str) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{product.port}/v1/chat/completions",
        headers={"Authorization": f"Bearer {product.key}"},
        json={"model": model, "messages": [{"role": "user", "content": "What is a hold?"}]},
        timeout=WAIT_S,
    )
    answer.raise_for_status()


if __name__ == "__main__":
    main()
