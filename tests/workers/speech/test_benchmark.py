"""The speech benchmark runs, and both of its sides give the same audio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import audio


@pytest.mark.parametrize("more", [[], ["--processor-time"]])
def test_benchmark_compares_both_engines_and_their_audio(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = checkpoint("vits")

    audio.main(["--checkpoint", str(path), "--together", "1", "2", "--repeats", "1", *more])

    said = capsys.readouterr().out
    for expected in ("2 together", "one by one", "real-time factor", "largest difference"):
        assert expected in said
