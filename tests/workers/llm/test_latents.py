"""Multi-head latent attention of DeepSeek: the cache has latents, the tokens are the library's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.llm import quantized_files as files
from tests.workers.llm.checkpoints import Reference, make_checkpoint, make_engine, make_spec
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from tests.workers.llm.test_engine import LONG, QUESTIONS
from workers.contract.jobs import Completed
from workers.engines.llm.checkpoint import read_shape
from workers.engines.llm.options import read_options

FAMILIES = ("deepseek2", "deepseek3")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 1024,
}

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_has_a_latent_and_a_rotary_key_for_each_token(
    family: str, checkpoint: Checkpoint
) -> None:
    spec = make_spec(checkpoint(family))

    _, shape = read_shape(spec, read_options(spec))

    # 32 and 8 numbers of four bytes, in two layers; keys and values of all heads would be 144.
    assert shape.token_bytes == 2 * 40 * 4
    engine = make_engine(checkpoint(family), cache_tokens=4096)
    assert engine.decoder.cache_bytes == (4096 + 2 * 64) * shape.token_bytes


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek2", {"q_lora_rank": 24}),
        ("deepseek2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
        ("deepseek2", {"attention_bias": True, "first_k_dense_replace": 1}),
        ("deepseek2", {"rope_parameters": YARN}),
        ("deepseek3", {"q_lora_rank": None}),
        ("deepseek3", {"rope_interleave": False}),
        ("deepseek3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("deepseek3", {"rope_parameters": YARN, "attention_bias": True}),
        ("deepseek3", {"first_k_dense_replace": 1}),
    ],
)
def test_variants_give_the_tokens_of_generate(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, **changes)
    engine, reference = make_engine(path), Reference(path)

    for number, question in enumerate(QUESTIONS[:3]):
        outcome = run_alone(engine, job(f"r{number}", question, max_tokens=20))
        assert texts(outcome) == [reference.generate(question, 20)[2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompt_is_answered_as_by_generate_and_read_from_the_cache(
    family: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(family)
    engine, reference = make_engine(path), Reference(path)

    first, again = (run_alone(engine, job(name, LONG, logprobs=True)) for name in ("a", "b"))

    assert isinstance(first, Completed)
    assert isinstance(again, Completed)
    assert texts(first) == [reference.generate(LONG, 12)[2]]
    assert (first.usage.cached_input_tokens, choices(again)) == (0, choices(first))
    assert (again.usage.cached_input_tokens or 0) > 2000


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_to_the_library(family: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(family)
    engine, reference = make_engine(path, dtype="bfloat16"), Reference(path)
    expected = reference.logprobs(QUESTIONS[2])

    outcome = run_alone(engine, job("a", QUESTIONS[2], max_tokens=1, logprobs=True, top_logprobs=5))

    found = [logprob for _, logprob in choices(outcome)[0]["logprobs"][0]["top"]]
    assert found == pytest.approx(expected.topk(5).values.tolist(), abs=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_tokens_change_no_answer(family: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(family)
    repeated = "the fox and the fox and the fox and the fox"
    plain = run_alone(make_engine(path), job("a", repeated, max_tokens=40))
    driver = Driver(make_engine(path, speculation={"method": "lookup", "tokens": 3}))

    driver.admit(job("a", repeated, max_tokens=40))
    driver.admit(job("b", QUESTIONS[0], max_tokens=30))
    driver.finish("a", "b")

    assert texts(driver.outcomes["a"]) == texts(plain)


@pytest.mark.parametrize("written", [files.fp8_blocks(32), files.gptq(4, 32)], ids=["fp8", "gptq"])
def test_quantised_files_are_read(written: files.Format, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "q_lora_rank": 32, "v_head_dim": 16}
    wide, short = files.write_both("deepseek3", tmp_path, written, **sizes)
    reference = Reference(wide)

    expanded = run_alone(make_engine(short, dtype="float32"), job("a", QUESTIONS[2]))
    kept = run_alone(make_engine(short, dtype=written.kind), job("a", QUESTIONS[2]))

    assert texts(expanded) == [reference.generate(QUESTIONS[2], 12)[2]]
    assert isinstance(kept, Completed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method noaux_tc is not supported; serve it with vLLM"),
        ({"norm_topk_prob": True}, "norm_topk_prob is not supported for DeepSeek-V2; serve it"),
    ],
)
def test_routing_that_the_library_does_not_compute_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_checkpoint("deepseek2", tmp_path, **changes)

    with pytest.raises(ValueError, match=message):
        make_engine(path)


def test_weights_of_projections_are_kept_once(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("deepseek3"))

    names = [name for name, _ in engine.checkpoint.model.named_parameters()]

    assert not [name for name in names if "kv_b_proj" in name]
    assert isinstance(run_alone(engine, job("a", "fox")), Completed)
    assert torch.is_inference_mode_enabled() is False
