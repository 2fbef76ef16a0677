"""The process of ``tollgate try``: what it measures of a model, and how it compares precisions."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.workers.llm.pictures import (
    PicturedReference,
    look,
    make_pictured,
    picture,
    pictured_spec,
)
from tests.workers.llm.quantized_files import awq, write_both
from workers.contract.jobs import ChatInput, ChatMessage
from workers.contract.models import ModelSpec
from workers.contract.trials import (
    ReferenceAnswer,
    TrialAgreement,
    TrialOrder,
    TrialReference,
    TrialReport,
    TrialRun,
)
from workers.runtime.trial import REQUESTS_MIN, Trial, difference

TEXTS = ("the quick brown fox", "a lazy dog counts to 12", "and jumps over")


def order(checkpoint: Path, *batches: int, dtype: str = "float32", **more: Any) -> TrialOrder:
    options = {"dtype": dtype, "device": "cpu", "threads": 1}
    spec = ModelSpec(
        "tiny", "text-generation", "llm", str(checkpoint), options, limits={"context_tokens": 256}
    )
    inputs = [
        ChatInput((ChatMessage("user", text),), max_tokens=6, temperature=0.0) for text in TEXTS
    ]
    return TrialOrder(spec, batches, tuple(map(msgspec.to_builtins, inputs)), 6, **more)


def run(given: TrialOrder) -> list[TrialReport]:
    reports: list[TrialReport] = []
    Trial(given, reports.append).run()
    # As it passes from process to process.
    return [
        msgspec.json.decode(msgspec.json.encode(report), type=TrialReport) for report in reports
    ]


def answers(checkpoint: Path) -> tuple[ReferenceAnswer, ...]:
    (reference,) = [one for one in run(order(checkpoint, 1)) if isinstance(one, TrialReference)]
    return reference.answers


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> tuple[ReferenceAnswer, ...]:
    return answers(checkpoint("qwen3"))


def test_each_batch_is_measured_and_compared_once(
    checkpoint: Callable[[str], Path], reference: tuple[ReferenceAnswer, ...]
) -> None:
    one, agreement, three = run(order(checkpoint("qwen3"), 1, 3, reference=reference))

    assert isinstance(one, TrialRun)
    assert isinstance(three, TrialRun)
    assert (one.batch, one.problem, one.device) == (1, None, "cpu")
    assert (len(one.timings), len(three.timings)) == (REQUESTS_MIN, 6)
    assert 0 < one.output_tokens <= 6 * len(one.timings)
    for timings in (*one.timings, *three.timings):
        assert 0 < timings.first_token_us <= timings.total_us
    # The engine's answers and the library's are of the same weights.
    tokens = sum(len(answer.tokens) for answer in reference)
    assert agreement == TrialAgreement(compared=tokens, equal=tokens)


def test_other_weights_agree_less(
    checkpoint: Callable[[str], Path], reference: tuple[ReferenceAnswer, ...]
) -> None:
    _, agreement = run(order(checkpoint("llama"), 1, reference=reference))

    assert isinstance(agreement, TrialAgreement)
    assert agreement.equal < agreement.compared


def test_what_the_device_or_its_memory_cannot_do_is_reported_and_the_rest_is_measured(
    checkpoint: Callable[[str], Path], reference: tuple[ReferenceAnswer, ...]
) -> None:
    (refused,) = run(order(checkpoint("qwen3"), 1, dtype="float16", reference=reference))
    large, small, agreement = run(
        order(checkpoint("qwen3"), 10**7, 1, dtype="int8", reference=reference)
    )

    assert isinstance(refused, TrialRun)
    assert "float16 is many times slower" in (refused.problem or "")
    assert isinstance(large, TrialRun)
    assert "GiB are free" in (large.problem or "")
    assert isinstance(small, TrialRun)
    assert small.problem is None
    assert isinstance(agreement, TrialAgreement)
    assert agreement.compared


def test_a_request_that_fails_is_the_problem_of_its_batch(
    checkpoint: Callable[[str], Path],
) -> None:
    given = order(checkpoint("qwen3"), 1)
    long = {**given.inputs[0], "messages": [{"role": "user", "content": "fox " * 300}]}

    (failed,) = run(msgspec.structs.replace(given, inputs=(long,)))

    assert isinstance(failed, TrialRun)
    assert "this model's context is 256" in (failed.problem or "")


def test_difference_of_pictures_is_a_share_of_the_range() -> None:
    def picture(value: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(file, "PNG")
        return file.getvalue()

    assert difference(picture(10), picture(10)) == 0
    assert difference(picture(0), picture(51)) == pytest.approx(0.2)


def test_conversations_with_pictures_are_measured_and_compared(tmp_path: Path) -> None:
    parts = ("what is ", picture(60, 30, 1), " and ", picture(30, 80, 2))
    spec = pictured_spec(make_pictured("qwen2.5vl", tmp_path), threads=1, device="cpu")
    job, shown = look("r", *parts)
    files = tuple(shown)
    given = TrialOrder(spec, (1,), (job.input,), 12, files=files)

    timed, reference = run(given)
    assert isinstance(reference, TrialReference)
    _, same = run(msgspec.structs.replace(given, reference=reference.answers))
    others = (picture(60, 30, 8), picture(30, 80, 9))
    _, blind = run(msgspec.structs.replace(given, reference=reference.answers, files=others))

    assert isinstance(timed, TrialRun)
    assert timed.problem is None
    (answer,) = reference.answers
    library = PicturedReference(tmp_path)
    text = library.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert text == library.generate(parts, 12)[2]
    assert same == TrialAgreement(compared=len(answer.tokens), equal=len(answer.tokens))
    assert isinstance(blind, TrialAgreement)
    assert blind.equal < blind.compared, "of other pictures, another answer"


def test_weights_of_four_bits_agree_with_what_they_stand_for(tmp_path: Path) -> None:
    wide, short = write_both("qwen3", tmp_path, awq(32), hidden_size=64, intermediate_size=128)
    reference = answers(wide)

    _, exact = run(order(short, 1, dtype="float32", reference=reference))
    _, kept = run(order(short, 1, dtype="int4", reference=reference))

    assert isinstance(exact, TrialAgreement)
    assert isinstance(kept, TrialAgreement)
    assert exact.equal == exact.compared > 0
    assert kept.equal > kept.compared / 2
