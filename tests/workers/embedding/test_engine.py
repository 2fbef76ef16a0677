"""Vectors equal those of the library, whatever else is in the batch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests.workers.llm.checkpoints import make_tokenizer
from tests.workers.llm.driver import Clock
from workers.contract.jobs import (
    Cancelled,
    Completed,
    EmbeddingInput,
    Failed,
    Job,
    Outcome,
    RequestId,
)
from workers.contract.models import ModelSpec
from workers.engines.embedding.engine import EmbeddingEngine
from workers.protocol.engine import Admitted, Wait

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 2, "eos_token_id": 1}
MODELS: dict[str, Callable[[int], Any]] = {
    "bert": lambda size: BertModel(BertConfig(vocab_size=size, **_SHAPE)),
    "roberta": lambda size: RobertaModel(RobertaConfig(vocab_size=size, **_SHAPE)),
    "xlm": lambda size: XLMRobertaModel(XLMRobertaConfig(vocab_size=size, **_SHAPE)),
    "mpnet": lambda size: MPNetModel(MPNetConfig(vocab_size=size, **_SHAPE)),
    "modernbert": lambda size: ModernBertModel(
        ModernBertConfig(vocab_size=size, **_SHAPE, local_attention=16)
    ),
    "qwen2": lambda size: Qwen2Model(Qwen2Config(vocab_size=size, **_DECODER)),
    "qwen3": lambda size: Qwen3ForCausalLM(Qwen3Config(vocab_size=size, head_dim=12, **_DECODER)),
    "llama": lambda size: LlamaModel(LlamaConfig(vocab_size=size, **_DECODER)),
    "mistral": lambda size: MistralModel(MistralConfig(vocab_size=size, **_DECODER)),
}
DECODERS = ("qwen2", "qwen3", "llama", "mistral")
TEXTS = ("the fox", "a lazy dog and counts to 0123", "the quick brown fox jumps " * 6, "!")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(f"embed-{family}")
            tokenizer = make_tokenizer(None)
            torch.manual_seed(3)
            MODELS[family](len(tokenizer)).save_pretrained(path)
            tokenizer.save_pretrained(path)
            made[family] = path
        return made[family]

    return make


def _engine(path: Path, *, limits: Any = None, **options: Any) -> EmbeddingEngine:
    spec = ModelSpec(
        name="tiny",
        task="text-embedding",
        engine="embedding",
        checkpoint=str(path),
        options={"device": "cpu", "threads": 1, **options},
        limits=limits or {},
    )
    engine = EmbeddingEngine(spec)
    engine.load()
    return engine


def _job(name: str, *inputs: Any, dimensions: int | None = None) -> Job:
    value = msgspec.to_builtins(EmbeddingInput(inputs, dimensions))
    return Job(RequestId(name), "1", "tiny", "text-embedding", value)


def _run(engine: EmbeddingEngine, *jobs: Job) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        assert isinstance(engine.admit(job, Clock()), Admitted)
    for _ in range(100):
        for id, outcome in engine.step(Clock()).outcomes:
            outcomes[id] = outcome
            engine.release(id)
        if len(outcomes) == len(jobs):
            return outcomes
    raise AssertionError("the jobs did not end")


def _vectors(outcome: Outcome) -> torch.Tensor:
    assert isinstance(outcome, Completed), outcome
    rows = outcome.output["vectors"]
    return torch.tensor([struct.unpack(f"<{len(row) // 4}f", row) for row in rows])


def _expected(path: Path, text: str, *, pooling: str) -> torch.Tensor:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector: torch.Tensor = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / vector.norm()


@pytest.mark.parametrize("family", MODELS)
def test_vectors_equal_those_of_the_library_alone_and_in_a_batch(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    engine = _engine(path)
    pooling = "last" if family in DECODERS else "mean"

    together = _run(engine, _job("a", *TEXTS[:3]), _job("b", TEXTS[3], TEXTS[1]))

    vectors = torch.cat([_vectors(together["a"]), _vectors(together["b"])])
    for row, text in zip(vectors, (*TEXTS, TEXTS[1]), strict=True):
        expected = _expected(path, text, pooling=pooling)
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
        alone = _vectors(_run(engine, _job("c", text))["c"])[0]
        torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_vectors_in_bfloat16_are_near_those_of_the_library(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    engine = _engine(path, dtype="bfloat16")
    pooling = "last" if family in DECODERS else "mean"

    vectors = _vectors(_run(engine, _job("a", *TEXTS))["a"])

    assert engine.hardware.dtype == "bfloat16"
    for row, text in zip(vectors, TEXTS, strict=True):
        assert float(row @ _expected(path, text, pooling=pooling)) > 0.999


def test_tokens_are_counted_and_token_ids_are_passed_through(
    checkpoint: Callable[[str], Path],
) -> None:
    path = checkpoint("bert")
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ids = tuple(tokenizer.encode(TEXTS[1]))

    outcome = _run(_engine(path), _job("a", TEXTS[1], ids))["a"]

    assert outcome.usage.input_tokens == 2 * len(ids)
    vectors = _vectors(outcome)
    torch.testing.assert_close(vectors[0], vectors[1])


def test_checkpoint_configures_pooling_and_normalisation(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "configured"
    path.mkdir()
    for file in checkpoint("bert").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (path / "modules.json").write_text("[]")

    vector = _vectors(_run(_engine(path), _job("a", TEXTS[1]))["a"])[0]

    assert abs(float(vector.norm()) - 1) > 1e-3
    expected = _expected(path, TEXTS[1], pooling="cls")
    torch.testing.assert_close(vector / vector.norm(), expected, atol=1e-5, rtol=1e-4)
    mean = _vectors(_run(_engine(path, pooling="mean", normalize=True), _job("a", TEXTS[1]))["a"])
    torch.testing.assert_close(
        mean[0], _expected(path, TEXTS[1], pooling="mean"), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls_token, pooling_mode_mean",
        ),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "module Dense"),
    ],
)
def test_unsupported_pooling_and_modules_are_refused(
    file: str, content: Any, message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for each in checkpoint("bert").iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / file).write_text(json.dumps(content))

    with pytest.raises(ValueError, match=message):
        _engine(tmp_path)


def test_vectors_can_be_truncated_only_with_matryoshka(
    checkpoint: Callable[[str], Path],
) -> None:
    path = checkpoint("qwen3")
    engine = _engine(path, matryoshka=True)
    whole = _vectors(_run(engine, _job("a", "the fox"))["a"])[0]

    short = _vectors(_run(engine, _job("a", "the fox", dimensions=8))["a"])[0]

    torch.testing.assert_close(short, whole[:8] / whole[:8].norm())
    refused = _engine(path).admit(_job("b", "the fox", dimensions=8), Clock())
    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("unsupported_parameter", "dimensions")


@pytest.mark.parametrize(
    ("inputs", "code", "message"),
    [
        (("ok", "fox " * 300), "context_length_exceeded", "Input 1 has .* context has 256"),
        (("ok", (5, 100_000)), "invalid_input", "Input 1 .* token 100000"),
        (("ok", (-1,)), "invalid_input", "token -1"),
    ],
)
def test_error_names_the_invalid_input(
    inputs: tuple[Any, ...], code: str, message: str, checkpoint: Callable[[str], Path]
) -> None:
    engine = _engine(checkpoint("bert"))

    refused = engine.admit(_job("a", *inputs), Clock())

    assert isinstance(refused, Failed)
    assert refused.code == code
    assert re.search(message, refused.message)


def test_cancelled_request_ends_with_its_usage(checkpoint: Callable[[str], Path]) -> None:
    engine = _engine(checkpoint("bert"), slots=1)
    engine.admit(_job("a", "the fox"), Clock())
    assert isinstance(engine.admit(_job("b", "x"), Clock()), Wait)

    engine.cancel(RequestId("a"), "client")
    ((id, outcome),) = engine.step(Clock()).outcomes

    assert isinstance(outcome, Cancelled)
    assert outcome.usage.input_tokens == 0
    engine.release(id)


@pytest.mark.usefixtures("single_layers")
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_batch_is_interrupted_between_layers(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    engine = _engine(checkpoint(family))
    engine.admit(_job("a", "the fox", "a lazy dog"), Clock())
    steps = [engine.step(Clock())]
    while not steps[-1].outcomes:
        steps.append(engine.step(Clock()))
    engine.release(RequestId("a"))

    ((_, outcome),) = steps[-1].outcomes
    assert len(steps) > 2
    assert all(step.weights["a"] > 0 for step in steps)  # type: ignore[index]
    assert isinstance(outcome, Completed)
    alone = [_run(engine, _job(text, text))[text] for text in ("the fox", "a lazy dog")]
    for vector, other in zip(_vectors(outcome), alone, strict=True):
        assert torch.allclose(vector, _vectors(other)[0], atol=1e-5)
    engine.admit(_job("b", "gone"), Clock())
    engine.step(Clock())
    assert (call := engine._batches._call) is not None
    engine.release(RequestId("b"))
    assert call._computation.dead


@pytest.mark.parametrize(
    ("options", "limits", "message"),
    [
        ({"pooling": "max"}, {}, "pooling"),
        ({"slots": 0}, {}, "slots is 0"),
        ({"slotz": 1}, {}, "options of the engine embedding are dtype, device, slots"),
        ({"dtype": "float16"}, {}, "float16 is many times slower"),
        ({}, {"dimensions": 64}, "64, but the model's vectors have 48"),
        ({}, {"context_tokens": 300}, "300, but the model supports 256 positions"),
    ],
)
def test_unsupported_options_and_limits_are_refused(
    options: Any, limits: Any, message: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        _engine(checkpoint("bert"), limits=limits, **options)


def test_unsupported_family_is_refused_with_an_alternative(tmp_path: Path) -> None:
    GPT2Model(GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=r"unsupported model family GPT2Model.*upstream"):
        _engine(tmp_path)
