"""Compares Tollgate with LiteLLM's proxy: the same chat to the same instant upstream.

LiteLLM is installed into a separate environment under ``.bench/``. It runs without a database, so
it neither holds nor books credit; Tollgate runs as usual, with its ledger.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.load import Figures, chat_load
from benchmarks.processes import free_port, start_product, wait_until_up

SECONDS = 6.0
CONCURRENCY = (1, 8, 64)
ENVIRONMENT = Path(".bench")

CONFIG = """\
model_list:
  - model_name: upstream
    litellm_params:
      model: openai/fake
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
general_settings:
  master_key: sk-bench
litellm_settings:
  telemetry: false
"""


def main() -> None:
    print("\npeer: the same chat to the same instant upstream, not streamed")
    port = free_port()
    upstream = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_upstream", str(port)])
    try:
        with tempfile.TemporaryDirectory(prefix="tg-") as directory:
            product = start_product(Path(directory), None, upstream_port=port)
            ours = measure(product.port, product.key)
            product.stop()
            theirs = measure_litellm(Path(directory), port)
    finally:
        upstream.kill()
        upstream.wait()
    print(f"{'concurrency':>12}{'Tollgate':>22}{'LiteLLM':>22}{'ratio of rates':>16}")
    for concurrency, mine, other in zip(CONCURRENCY, ours, theirs, strict=True):
        ratio = f"{mine.rate / other.rate:.1f}x"
        print(f"{concurrency:>12}{_short(mine):>22}{_short(other):>22}{ratio:>16}")


def measure(port: int, key: str) -> list[Figures]:
    return [
        chat_load(
            port=port,
            key=key,
            model="upstream",
            concurrency=concurrency,
            seconds=SECONDS,
            path="/v1/chat/completions",
        )
        for concurrency in CONCURRENCY
    ]


def measure_litellm(directory: Path, upstream_port: int) -> list[Figures]:
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "litellm[proxy]"], check=True
        )
        (ENVIRONMENT / "installed").touch()
    config = directory / "litellm.yaml"
    config.write_text(CONFIG.format(port=upstream_port))
    port = free_port()
    process = subprocess.Popen(
        [str(ENVIRONMENT / "bin" / "litellm"), "--config", str(config), "--port", str(port)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health/liveliness", process, seconds=120)
        return measure(port, "sk-bench")
    finally:
        process.terminate()
        process.wait()


def _short(figures: Figures) -> str:
    note = f" {figures.errors} errors" if figures.errors else ""
    return f"{figures.rate:,.0f}/s p50 {figures.p50_ms:.1f} ms{note}"
