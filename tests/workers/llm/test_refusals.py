"""What is not supported is refused by name: on load for operators, on admission for clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.workers.llm.checkpoints import Reference, make_checkpoint, make_engine, make_spec
from tests.workers.llm.driver import Driver, job, run_alone, texts
from workers.contract.jobs import Completed, Failed, Tool
from workers.engines.llm.engine import LlmEngine
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]


# --- For the operator -----------------------------------------------------------------------------


def test_unsupported_family_is_refused_with_an_alternative(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*vLLM.*upstream"):
        make_engine(checkpoint("gpt2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "float16 is many times slower"),
        ({"dtype": "int3"}, "dtype is 'int3'; one of auto, float32, bfloat16, float16, int8, fp8"),
        ({"device": "tpu"}, "device is 'tpu'; accepted are auto, cpu, cuda"),
        (
            {"slotz": 3},
            "options of the engine llm are dtype, device, slots, threads, cache_tokens, prefix",
        ),
        ({"slots": 0}, "slots is 0; at least 1"),
        ({"cache_tokens": 0}, "cache_tokens is 0; at least 1"),
        ({"speculation": {"tokens": 17}}, "speculation.tokens is 17; it must be 1 to 16"),
        (
            {"speculation": {"method": "draft"}},
            "speculation.checkpoint is required for the method draft",
        ),
        (
            {"speculation": {"checkpoint": "x"}},
            "speculation.checkpoint is required for the method draft",
        ),
        ({"slots": "many"}, r"Expected `int`.*slots"),
        ({"threads": 0}, "threads is 0; at least 1"),
        ({"context_tokens": "all"}, "limits.context_tokens is 'all'"),
        ({"context_tokens": 5000}, "5000, but the model supports 4096 positions"),
        ({"slots": 100_000_000}, r"6400000000 tokens takes .* GiB.*lower"),
    ],
)
def test_unsupported_options_are_refused(
    options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(checkpoint("llama"), **options)


def test_options_common_to_all_engines_are_accepted(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"), concurrency=3, weight=2.0, threads=1)

    assert isinstance(run_alone(engine, job("a", "fox")), Completed)


def _drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _configure(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))

    return change


def _remove_a_weight(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _truncate_the_weights(path: Path) -> None:
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop("config.json"), "has no config.json"),
        (_drop("tokenizer.json"), "has no tokenizer.json"),
        (_drop("model.safetensors"), r"has no \*.safetensors"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (_configure(architectures=None), "unsupported model family unknown"),
        (_configure(quantization_config={"quant_method": "hqq"}), r"quantised weights \(hqq\)"),
        (
            _configure(intermediate_size=64),
            r"do not fit config.json: 6 mismatched, including model.layers.0",
        ),
        (_remove_a_weight, r"1 missing, including model.layers.1.self_attn.q_proj.weight"),
        (_truncate_the_weights, "cannot be read"),
    ],
)
def test_damaged_checkpoint_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path)
    damage(path)

    with pytest.raises(ValueError, match=message):
        make_engine(path)


def test_entry_without_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="names no checkpoint"):
        LlmEngine(make_spec(None)).load()


def test_model_without_a_template_continues_texts_and_refuses_conversations(
    tmp_path: Path,
) -> None:
    path = make_checkpoint("llama", tmp_path)
    (path / "chat_template.jinja").unlink()
    engine = make_engine(path)

    continued = run_alone(engine, job("a", "", prompts=("the fox",), max_tokens=4))
    refused = Driver(engine).admit(job("b", "fox"))

    assert isinstance(continued, Completed)
    assert continued.usage.output_tokens == 4
    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("invalid_input", "messages")
    assert "no chat template" in refused.message


def test_broken_template_is_refused_on_load(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, template="{{ messages[0]['text'].upper() }}")

    with pytest.raises(ValueError, match="cannot render a conversation"):
        make_engine(path)


def test_long_rotary_factors_limit_the_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    path = make_checkpoint(
        "phi3",
        tmp_path,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )

    with pytest.raises(ValueError, match="65, but its long rotary factors, from 64 on"):
        make_engine(path, context_tokens=65)
    content = "the quick brown fox"
    outcome = run_alone(make_engine(path), job("a", content, max_tokens=100))

    assert isinstance(outcome, Completed)
    prompt, generated, text = Reference(path).generate(content, outcome.usage.output_tokens)
    assert (prompt + generated, *texts(outcome)) == (64, text)


# --- For the client -------------------------------------------------------------------------------


def test_prompt_beyond_the_context_is_refused_with_both_numbers(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    driver = Driver(make_engine(path, context_tokens=32))
    content = "the quick brown fox " * 30

    answer = driver.admit(job("a", content))

    assert isinstance(answer, Failed)
    assert (answer.code, answer.param) == ("context_length_exceeded", "messages")
    tokens = Reference(path).generate(content, 1)[0]
    assert f"{tokens} tokens" in answer.message
    assert "context is 32" in answer.message


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"tools": (Tool("now"),)}, "unsupported_parameter", "tools"),
        ({"response_format": _schema({"type": "strange"})}, "invalid_input", "response_format"),
        ({"prompts": ("",)}, "invalid_input", "prompt"),
        ({"prompts": ((5, -1),)}, "invalid_input", "prompt"),
        ({"prompts": ((5, 100_000),)}, "invalid_input", "prompt"),
        ({"n": 5}, "invalid_input", "n"),
        ({"max_tokens": 0}, "invalid_input", "max_tokens"),
        ({"logit_bias": {100_000: 1.0}}, "invalid_input", "logit_bias"),
        ({"role": "tool"}, "invalid_input", "messages"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    asked: dict[str, Any], code: str, param: str, tmp_path: Path
) -> None:
    refusing = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x"
    driver = Driver(make_engine(make_checkpoint("llama", tmp_path, template=refusing)))

    answer = driver.admit(job("a", "x", **asked))

    assert isinstance(answer, Failed)
    assert (answer.code, answer.param) == (code, param)


def test_text_is_accepted_as_response_format(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama")))

    assert isinstance(driver.admit(job("a", "x", response_format={"type": "text"})), Admitted)


def test_refused_jobs_take_no_slots(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama"), slots=1, context_tokens=32))

    for number in range(3):
        driver.admit(job(f"r{number}", "the quick brown fox " * 30))

    assert isinstance(driver.admit(job("a", "x")), Admitted)
    driver.finish("a")
