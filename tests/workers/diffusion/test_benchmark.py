"""The diffusion benchmark runs, and all its runners generate the same images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import diffusion

TINY = ["--requests", "3", "--short", "1", "--long", "3", "--repeats", "1", "--together", "2"]


@pytest.mark.parametrize("more", [[], pytest.param(["--processor-time"], marks=pytest.mark.long)])
def test_benchmark_compares_all_engines_and_their_images(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = checkpoint("StableDiffusionPipeline")

    diffusion.main(["--checkpoint", str(path), *TINY, *more])

    output = capsys.readouterr().out
    for expected in (
        "one by one",
        "whole requests",
        "largest difference",
        "concatenated",
        "the loop",
    ):
        assert expected in output
