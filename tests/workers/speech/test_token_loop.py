"""Rows of codec tokens: they share steps, join and leave between them, and do not depend on each
other."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from tests.workers.speech.driver import Driver, samples, speak, spec
from workers.contract.jobs import Failed
from workers.engines.speech.engine import SpeechEngine
from workers.engines.speech.row_cache import ROWS, RowCache
from workers.engines.speech.token_loop import TokenLoop

Checkpoint = Callable[[str], Path]
FAMILIES = ("csm", "dia", "musicgen")
TEXTS = ("hello there, you", "yes", "no, not at all, and never again", "hm", "so", "it is")


def of(checkpoint: Checkpoint, name: str, **options: Any) -> Any:
    seconds = 1.5 if name == "csm" else 0.4
    task = "text-to-music" if name == "musicgen" else "text-to-speech"
    return spec(checkpoint(name), task, sentence_seconds=seconds, seconds=seconds, **options)


def ask(name: str, number: int) -> dict[str, Any]:
    return {"prompt" if name == "musicgen" else "text": TEXTS[number], "seed": number}


def loop_of(driver: Driver) -> TokenLoop:
    assert driver.engine._loaded is not None
    assert driver.engine._loaded.loop is not None
    return driver.engine._loaded.loop


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_join_and_leave_have_the_audio_of_each_alone(
    checkpoint: Checkpoint, name: str, dtype: str
) -> None:
    driver = Driver(of(checkpoint, name, dtype=dtype))
    alone = [speak(driver, **ask(name, number)) for number in range(len(TEXTS))]

    for number in range(len(TEXTS)):
        driver.admit(str(number), **ask(name, number))
        for _ in range(3):
            driver.step()
    driver.finish()

    for number, wanted in enumerate(alone):
        assert np.array_equal(samples(driver.file(str(number))), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_shared(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    loop, together = loop_of(driver), []
    run = loop.sample

    def count(hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        together.append(int((keys[:, 0] != 0).sum()))
        return run(hidden, keys)

    with mock.patch.object(loop, "sample", count):
        speak(driver, **ask(name, 0))
        steps_alone = len(together)
        together.clear()
        for number in range(6):
            driver.admit(str(number), **ask(name, 0))
        driver.finish()

    assert max(together) == 6
    # A busy machine begins some of them later; one by one, they would take six times as many.
    assert len(together) < 2 * steps_alone


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_are_freed_when_no_row_is_left(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    for number in range(2):
        driver.admit(str(number), **ask(name, number))
    for _ in range(6):
        driver.step()
    assert driver.engine.memory.cache_bytes > 0

    driver.engine.cancel("0", "client")  # type: ignore[arg-type]
    driver.engine.cancel("1", "deadline")  # type: ignore[arg-type]
    driver.step()

    assert driver.engine.memory.cache_bytes == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_unloading_frees_the_weights_of_a_model_that_has_served(
    checkpoint: Checkpoint, name: str
) -> None:
    driver = Driver(of(checkpoint, name))
    speak(driver, **ask(name, 0))
    module = weakref.ref(loop_of(driver).module)

    driver.engine.unload()
    gc.collect()

    assert module() is None


@pytest.mark.parametrize("name", FAMILIES)
def test_non_finite_scores_fail_only_their_request(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    wanted = speak(driver, **ask(name, 1))
    loop = loop_of(driver)
    driver.admit("bad", **ask(name, 0))
    driver.admit("good", **ask(name, 1))
    while len(loop._rows) < 2:
        driver.step()

    loop._hidden[0] = loop._hidden[0] * torch.nan
    driver.finish()

    assert isinstance(outcome := driver.outcomes["bad"], Failed)
    assert outcome.code == "engine_error"
    assert np.array_equal(samples(driver.file("good")), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_batch_that_fails_is_repeated_by_halves(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    alone = [speak(driver, **ask(name, number)) for number in range(3)]
    loop, rows = loop_of(driver), []
    sample, run = loop.sample, loop.run

    def count(hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows.append(int((keys[:, 0] != 0).sum()))
        return sample(hidden, keys)

    def limited(*given: Any, **others: Any) -> torch.Tensor:
        if rows[-1] > 2:
            raise torch.OutOfMemoryError
        return run(*given, **others)

    with mock.patch.multiple(loop, sample=count, run=limited):
        for number in range(3):
            driver.admit(str(number), **ask(name, number))
        driver.finish()

    assert 3 in rows
    for number, wanted in enumerate(alone):
        assert np.array_equal(samples(driver.file(str(number))), wanted)


def test_greedy_checkpoint_ignores_the_seed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("csm"), tmp_path / "greedy")
    config = json.loads((path / "generation_config.json").read_text())
    config |= {"do_sample": False, "depth_decoder_do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(config))
    driver = Driver(of(lambda _: path, "csm"))

    first, second = (speak(driver, text="yes", seed=seed) for seed in (1, 2))

    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", FAMILIES)
def test_processor_that_looks_at_earlier_tokens_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    path = shutil.copytree(checkpoint(name), tmp_path / name)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 1.2}))
    engine = SpeechEngine(of(lambda _: path, name))

    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor, which is not supp"):
        engine.load()


def test_row_cache_grows_without_losing_anything() -> None:
    cache = RowCache(lanes=2)
    prompts = [_prompt(length) for length in (3, 100)]

    for row, prompt in enumerate(prompts):
        cache.store(row, prompt)
    cache.reserve(ROWS + 1, 500)

    (layer,) = cache.layers
    assert layer.all_keys.shape[0] == 2 * 2 * ROWS
    for row, prompt in enumerate(prompts):
        keys = prompt.layers[0].keys
        assert torch.equal(layer.all_keys[2 * row : 2 * row + 2, :, : keys.shape[2]], keys)


def test_row_cache_keeps_nothing_of_an_earlier_sequence() -> None:
    cache = RowCache(lanes=2)
    cache.store(0, _prompt(100))
    (layer,) = cache.layers
    layer.all_keys[:2], layer.all_values[:2] = torch.nan, torch.nan

    cache.store(0, _prompt(3))

    assert layer.all_keys.isfinite().all()
    assert layer.all_values.isfinite().all()


def test_row_cache_that_ran_out_of_memory_while_it_grew_grows_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, prompt = RowCache(lanes=2), _prompt(100, layers=3)
    cache.store(0, prompt)
    allocate, calls = torch.Tensor.new_zeros, []

    def fail_once(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError
        return allocate(*args, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(ROWS + 1, 500)
    cache.reserve(ROWS, 200)
    cache.reserve(ROWS + 1, 400)

    for layer, stored in zip(cache.layers, prompt.layers, strict=True):
        for kept, wanted in ((layer.all_keys, stored.keys), (layer.all_values, stored.values)):
            assert kept.shape[0] >= 2 * (ROWS + 1)
            assert kept.shape[2] >= 400
            assert torch.equal(kept[:2, :, :100], wanted)


def _prompt(length: int, layers: int = 1) -> Any:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.randn(2, 1, length, 4), torch.randn(2, 1, length, 4), layer)
    return cache
