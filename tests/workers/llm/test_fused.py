"""The engine's own forward gives what the library's modules give, and has the weights once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.llm.checkpoints import make_checkpoint, make_spec
from workers.engines.llm import fused, loading
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Weights
from workers.engines.llm.options import read_options

IDS = [7, 11, 3, 42, 9, 60, 31, 2, 25]

Checkpoint = Callable[[str], Path]


def logits_of(path: Path, *, library: bool = False, **options: Any) -> torch.Tensor:
    """Prefill all tokens but two, then decode these; return the logits of each step."""
    spec = make_spec(path, **options)
    weights = Weights(spec, read_options(spec))
    with pytest.MonkeyPatch.context() as patch:
        if library:
            patch.setattr(fused, "FUSED_FAMILIES", ())
        decoder = loading.make_decoder(weights, read_options(spec))
    assert isinstance(decoder._model, fused.FusedModel) is not library
    steps = []
    with torch.inference_mode():
        first = SequenceInput(IDS[:-2], 0, [1], logits_kept=3)
        steps.append(decoder.run(decoder.stage([], [first])))
        for place in (-2, -1):
            row = SequenceInput([IDS[place]], len(IDS) + place, [1])
            steps.append(decoder.run(decoder.stage([row], [])))
    return torch.cat(steps)


def keep_weights(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_COLUMNS_MAX", 1 << 40 if order == "columns" else 0)
    monkeypatch.setattr(fused, "_PACKED_FROM", 1 if order == "packed" else 1 << 40)


@pytest.fixture(params=["columns", "packed"])
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_weights(request.param, monkeypatch)


@pytest.fixture
def all_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_weights("packed", monkeypatch)


@pytest.mark.parametrize("order", ["columns", "packed", "plain"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_logits_are_those_of_the_library(
    family: str, order: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights(order, monkeypatch)

    found = logits_of(checkpoint(family))

    expected = logits_of(checkpoint(family), library=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["biases", "tied head", "own head", "linear rope", "dynamic rope", "llama3 rope"],
)
def test_variants_are_those_of_the_library(
    changes: dict[str, Any], tmp_path: Path, any_order: None
) -> None:
    path = make_checkpoint("llama", tmp_path, **changes)

    torch.testing.assert_close(logits_of(path), logits_of(path, library=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_shorter_types_are_close_to_the_library(
    dtype: str, checkpoint: Checkpoint, all_packed: None
) -> None:
    path = checkpoint("qwen3")

    found, expected = logits_of(path, dtype=dtype), logits_of(path, library=True, dtype=dtype)

    # Each of some ten roundings per layer can differ by one unit of the last place.
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.995


def test_another_activation_is_left_to_the_library(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, hidden_act="gelu")
    spec = make_spec(path)

    decoder = loading.make_decoder(Weights(spec, read_options(spec)), read_options(spec))

    assert not isinstance(decoder._model, fused.FusedModel)


def test_weights_are_kept_once(checkpoint: Checkpoint, any_order: None) -> None:
    spec = make_spec(checkpoint("llama"))
    weights = Weights(spec, read_options(spec))
    embedding = weights.model.get_input_embeddings().weight

    loading.make_decoder(weights, read_options(spec))

    left = {
        name: tensor.numel()
        for name, tensor in weights.model.named_parameters()
        if tensor.ndim == 2 or tensor.numel() == 0
    }
    kept = {name for name, count in left.items() if count}
    assert kept <= {"model.embed_tokens.weight", "lm_head.weight"}
    assert weights.model.get_input_embeddings().weight is embedding


def test_weights_are_kept_by_columns_only_where_a_row_does_not_depend_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply = torch.nn.functional.linear

    def depend(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return multiply(x, *weights) + (len(x) >= 192)

    fused._is_shape_steady.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "linear", depend)
    assert not fused._is_steady(torch.zeros(32, 16), None)
    assert not fused._is_steady(torch.zeros(32, 16), torch.zeros(32))
    fused._is_shape_steady.cache_clear()
    assert not fused._is_steady(torch.zeros(32, 16, dtype=torch.bfloat16), None)
    assert not fused._is_steady(torch.zeros(32, 16, device="meta"), None)


def test_products_need_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    fused._packs.cache_clear()
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", raise_runtime_error, raising=False
    )

    assert not fused._packs(torch.device("cpu"), torch.float32)

    fused._packs.cache_clear()


def raise_runtime_error(*_: Any) -> None:
    raise RuntimeError("not built with oneDNN")
