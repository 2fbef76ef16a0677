"""The language engine on a GPU: attention in place, graphs, precisions, speculation.

Random models have near ties, so answers are compared with those of a CPU token by token until they
part, and where they part the two tokens must have been nearly equally likely.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.fakes import Clock
from tests.workers.llm.checkpoints import make_checkpoint, make_engine, make_spec
from tests.workers.llm.driver import Driver, choices, job, run_alone
from tests.workers.llm.pictures import FAMILIES as PICTURED
from tests.workers.llm.pictures import look, make_pictured, picture, pictured_engine
from tests.workers.llm.test_engine import EXPERTS, FAMILIES, LONG, QUESTIONS
from tests.workers.test_stored_layers import fp8_matrix, int4_matrix
from workers.contract.jobs import ChatInput, Completed
from workers.engines.llm import graphs, varlen
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.engine import LlmEngine
from workers.engines.llm.sampling import Draw, SampledToken, Sampler, draw
from workers.engines.llm.steps import launch
from workers.engines.precision import QUANTIZED
from workers.engines.quantized import layers
from workers.engines.quantized.layers import keep
from workers.protocol.engine import Admitted
from workers.runtime.step_loop import StepLoop

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]
TOLERANCE = {"float32": 0.02, "bfloat16": 0.35, "int8": 0.6, "fp8": 0.8}
"""Difference of log probabilities from a CPU, in float32 or quantised; TF32 has ten bits of
mantissa, and a CPU does not quantise the input of fp8."""


def _tokens(outcome: Any) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = choices(outcome)[0]["logprobs"]
    return found


def _assert_close(got: Any, expected: Any, most: float) -> None:
    compared = 0
    for one, other in zip(_tokens(got), _tokens(expected), strict=False):
        if one["text"] != other["text"]:
            likely = dict(other["top"])
            assert other["logprob"] - likely.get(one["text"], min(likely.values())) < 2 * most
            break
        assert abs(one["logprob"] - other["logprob"]) < most
        compared += 1
    assert compared, "even the first token differs"


def _ask(name: str, text: str, tokens: int = 24, **chat: Any) -> Any:
    return job(name, text, logprobs=True, top_logprobs=8, max_tokens=tokens, **chat)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family in FAMILIES
        for dtype in TOLERANCE
        if family not in EXPERTS or dtype not in QUANTIZED
    ],
)
def test_answers_are_those_of_a_cpu(family: str, dtype: str, chat_checkpoint: Checkpoint) -> None:
    path = chat_checkpoint(family)
    quantised = dtype if dtype in QUANTIZED else "float32"
    exact = make_engine(path, dtype=quantised)
    engine = make_engine(path, device="cuda:0", dtype=dtype)

    for number, text in enumerate((*QUESTIONS, LONG)):
        wanted = _ask(f"r{number}", text)
        _assert_close(run_alone(engine, wanted), run_alone(exact, wanted), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculation", [None, {"method": "lookup", "tokens": 3}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_answers_do_not_depend_on_other_requests(
    family: str, speculation: Any, dtype: str, chat_checkpoint: Checkpoint
) -> None:
    engine = make_engine(
        chat_checkpoint(family), device="cuda:0", dtype=dtype, speculation=speculation
    )
    r = random.Random(1)
    jobs = [
        _ask(
            f"r{number}",
            r.choice((*QUESTIONS, LONG)),
            r.randint(1, 60),
            temperature=r.choice([0.0, 1.0]),
            seed=number,
            n=r.choice([1, 2]),
        )
        for number in range(10)
    ]
    alone = {wanted.request_id: choices(run_alone(engine, wanted)) for wanted in jobs}

    driver = Driver(engine)
    waiting = list(jobs)
    while len(driver.outcomes) < len(jobs):
        while waiting and r.random() < 0.6 and isinstance(driver.admit(waiting[0]), Admitted):
            waiting.pop(0)
        driver.step()

    assert {name: choices(outcome) for name, outcome in driver.outcomes.items()} == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_of_torch_is_found(dtype: str, device: torch.device) -> None:
    assert varlen.find_attention(device, getattr(torch, dtype)) is not None


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_steps_are_replayed_from_a_recording(
    batch_invariant: bool, chat_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "_find_multiple", lambda _: False)
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    engine = make_engine(
        chat_checkpoint("llama"),
        device="cuda:0",
        dtype="bfloat16",
        batch_invariant=batch_invariant,
    )

    run_alone(engine, _ask("a", QUESTIONS[1], 40))

    assert len(replays) >= 30


def test_failed_recording_leaves_the_device_usable(
    chat_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronisation within a recording is what scaled rotary embeddings would cause."""

    def spoiled(run: graphs.Run) -> graphs.Run:
        def synchronising() -> torch.Tensor:
            out = run()
            if torch.cuda.is_current_stream_capturing():
                out.sum().item()
            return out

        return record(synchronising)

    record = graphs.record_cuda
    monkeypatch.setattr("workers.engines.llm.loading.record_cuda", spoiled)
    path = chat_checkpoint("llama")

    engine = make_engine(path, device="cuda:0", dtype="bfloat16")

    assert isinstance(run_alone(engine, _ask("a", QUESTIONS[0])), Completed)
    _assert_close(
        run_alone(engine, _ask("b", QUESTIONS[1])),
        run_alone(make_engine(path), _ask("b", QUESTIONS[1])),
        TOLERANCE["bfloat16"],
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 10000.0,
        },
    ],
    ids=["dynamic", "llama3"],
)
def test_scaled_rotary_embeddings_give_the_answers_of_a_cpu(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path, rope_parameters=rope)
    engine = make_engine(path, device="cuda:0", dtype="bfloat16")

    for wanted in (_ask("a", QUESTIONS[2]), _ask("b", LONG)):
        expected = run_alone(make_engine(path), wanted)
        _assert_close(run_alone(engine, wanted), expected, TOLERANCE["bfloat16"])


def test_cache_that_is_too_small_preempts_and_finishes_all(chat_checkpoint: Checkpoint) -> None:
    engine = make_engine(
        chat_checkpoint("qwen3"), device="cuda:0", dtype="bfloat16", cache_tokens=9 * 256
    )
    driver = Driver(engine)
    for name in "abcd":
        driver.admit(_ask(name, LONG[: 900 + 10 * ord(name)], 40))

    driver.finish(*"abcd")

    assert all(isinstance(driver.outcomes[name], Completed) for name in "abcd")


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 40, "min_p": 0.01},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    ],
)
def test_sampler_chooses_the_tokens_of_a_cpu(
    parameters: dict[str, Any], device: torch.device
) -> None:
    rows, vocabulary = 64, 152_000
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 3

    def chosen(where: torch.device) -> list[int]:
        chats = [ChatInput((), 1, **parameters) for _ in range(rows)]
        samplers = [Sampler(chat, prompt=(5, 9, 5), seed=n) for n, chat in enumerate(chats)]
        found = draw(logits.to(where), [Draw(one, row) for row, one in enumerate(samplers)])
        return [one.token for one in found if isinstance(one, SampledToken)]

    assert chosen(device) == chosen(torch.device("cpu"))


def test_draft_model_of_another_context_drafts_on_the_gpu(
    chat_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The tables of a recorded step are as wide as the longest sequence with its draft tokens."""
    path = chat_checkpoint("llama")
    small = make_checkpoint("llama", tmp_path, num_hidden_layers=1, max_position_embeddings=8192)
    speculation = {"method": "draft", "tokens": 4, "checkpoint": str(small)}
    engine = make_engine(path, device="cuda:0", dtype="bfloat16", speculation=speculation)

    for wanted in (_ask("a", QUESTIONS[1], 60), _ask("b", LONG, 30)):
        expected = run_alone(make_engine(path), wanted)
        _assert_close(run_alone(engine, wanted), expected, TOLERANCE["bfloat16"])


def test_long_rotary_factors_are_recorded(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    path = make_checkpoint(
        "phi3", tmp_path, original_max_position_embeddings=512, rope_parameters=rope
    )
    engine = make_engine(path, device="cuda:0", dtype="bfloat16")

    wanted = _ask("a", QUESTIONS[2], 40)
    expected = run_alone(make_engine(path), wanted)
    _assert_close(run_alone(engine, wanted), expected, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sliding_windows_are_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    shape = {"head_dim": 256} if family == "gemma3" else {}
    path = make_checkpoint(family, tmp_path, sliding_window=300, **shape)
    engine = make_engine(path, device="cuda:0", dtype="bfloat16")

    wanted = _ask("a", LONG, 30)
    expected = run_alone(make_engine(path), wanted)
    _assert_close(run_alone(engine, wanted), expected, TOLERANCE["bfloat16"])


def test_model_that_is_evicted_frees_the_device(chat_checkpoint: Checkpoint) -> None:
    clock = Clock()
    loop = StepLoop(worker="w1", now_us=clock.now_us, unix_ms=clock.unix_ms, budget_bytes=2 << 30)
    for name in ("llama", "qwen3"):
        spec = make_spec(chat_checkpoint(name), device="cuda:0", dtype="bfloat16")
        loop.add(name, LlmEngine(spec))
    before = torch.cuda.memory_allocated()

    assert loop.load("llama") is None
    first = torch.cuda.memory_allocated() - before
    loop.unload("llama")
    assert torch.cuda.memory_allocated() - before < first / 10
    assert loop.load("qwen3") is None
    loop.unload("qwen3")

    assert torch.cuda.memory_allocated() - before < first / 10
    assert all(lane.demand.bytes <= 2 << 30 for lane in loop.lanes.values())


def test_kernels_of_four_bits_and_of_fp8_blocks_are_used_and_right() -> None:
    device = torch.device("cuda:0")
    for kind, matrix in (("int4", int4_matrix(order=True)), ("fp8", fp8_matrix())):
        layer = keep(matrix, None, kind)
        assert layer is not None
        x = torch.randn(40, matrix.values.shape[1])
        expected = x @ matrix.widen().t()

        got = layer.to(device)(x.bfloat16().to(device)).float().cpu()

        assert float((got - expected).norm() / expected.norm()) < 0.06
    assert layers._multiplies_int4(device)
    assert layers._multiplies_blocks(device)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_nothing_waits_for_the_device_but_for_tokens(
    batch_invariant: bool, chat_checkpoint: Checkpoint
) -> None:
    """The next step is enqueued before the tokens of this one are read."""
    path = chat_checkpoint("llama")
    engines = [
        make_engine(path, device="cuda:0", dtype="bfloat16", batch_invariant=batch_invariant)
        for _ in range(2)
    ]
    engines[0].runs_ahead = False
    parameters: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5, "presence_penalty": 1.0},
    ]
    jobs = [
        _ask(f"r{number}", QUESTIONS[number], 60, **{"temperature": 1.0, **more})
        for number, more in enumerate(parameters)
    ]
    drivers = [Driver(engine) for engine in engines]
    for driver in drivers:
        for wanted in jobs:
            driver.admit(wanted)
    while engines[1]._ahead is None:
        drivers[1].step()

    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            drivers[1].step()
            assert engines[1]._ahead is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for driver in drivers:
        driver.finish(*(wanted.request_id for wanted in jobs))

    if batch_invariant:
        found = [[choices(one) for one in driver.outcomes.values()] for driver in drivers]
        assert found[0] == found[1]


@pytest.mark.parametrize("family", PICTURED)
def test_pictures_are_read_as_by_a_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SLICE_S", 0.0)
    path = make_pictured(family, tmp_path)
    shown = ("what is ", picture(60, 30, 1), " and ", picture(20, 90, 2))
    wanted, files = look("a", *shown, logprobs=True, top_logprobs=8)

    got = run_alone(pictured_engine(path, device="cuda:0", dtype="bfloat16"), wanted, files)

    expected = run_alone(pictured_engine(path, device="cpu"), wanted, files)
    _assert_close(got, expected, TOLERANCE["bfloat16"])
