"""Scores equal those of the library, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.workers.driving import EngineDriver
from tests.workers.reranking.checkpoints import MODELS, make_checkpoint
from workers.contract.jobs import Cancelled, Completed, Failed, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.reranking.engine import RerankEngine

DOCUMENTS = ("the fox jumps", "a lazy dog and counts to 0123", "!", "the quick brown fox " * 5)


def _spec(path: Path, limits: Any = None, **options: Any) -> ModelSpec:
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, **options}
    return ModelSpec(
        "tiny",
        "rerank",
        engine="rerank",
        checkpoint=str(path),
        options=settings,
        limits=limits or {},
    )


def _job(name: str, query: str, *documents: str) -> Job:
    given = {"query": query, "documents": list(documents)}
    return Job(RequestId(name), "1", "tiny", "rerank", given)


def _run(driver: EngineDriver[RerankEngine], *jobs: Job) -> dict[str, Any]:
    for job in jobs:
        driver.take(job)
    for _ in range(50):
        if all(job.request_id in driver.outcomes for job in jobs):
            break
        driver.step()
    return driver.outcomes


def _expected(path: Path, query: str, documents: tuple[str, ...]) -> tuple[list[float], int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    found, tokens = [], 0
    for document in documents:
        encoded = tokenizer(query, document, return_tensors="pt")
        tokens += encoded["input_ids"].shape[1]
        with torch.inference_mode():
            found.append(float(model.eval()(**encoded).logits[0, 0].sigmoid()))
    return found, tokens


@pytest.mark.usefixtures("whole_calls")
@pytest.mark.parametrize("family", MODELS)
def test_scores_equal_those_of_the_library_in_a_batch_of_requests(
    family: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / family, family)
    driver = EngineDriver(RerankEngine(_spec(path)))

    outcomes = _run(driver, _job("a", "who jumps", *DOCUMENTS), _job("b", "dog", DOCUMENTS[1]))

    assert driver.steps == 1, "all pairs are one batch"
    for name, query, documents in (("a", "who jumps", DOCUMENTS), ("b", "dog", DOCUMENTS[1:2])):
        scores, tokens = _expected(path, query, documents)
        outcome = outcomes[name]
        assert isinstance(outcome, Completed)
        assert outcome.output["scores"] == pytest.approx(scores, abs=1e-5)
        assert outcome.usage.input_tokens == tokens
        assert len(set(scores)) == len(scores)


def test_scores_can_be_those_of_the_model_as_they_are(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "bert")
    plain = EngineDriver(RerankEngine(_spec(path, activation="none")))

    found = _run(plain, _job("a", "dog", *DOCUMENTS))["a"].output["scores"]

    expected, _ = _expected(path, "dog", DOCUMENTS)
    assert [1 / (1 + 2.718281828**-score) for score in found] == pytest.approx(expected, abs=1e-5)


def test_long_documents_are_cut_and_long_queries_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "bert")
    driver = EngineDriver(RerankEngine(_spec(path, limits={"context_tokens": 20})))

    outcome = _run(driver, _job("a", "the fox", "dog " * 100, "dog"))["a"]
    failed = driver.take(_job("b", "fox " * 30, "dog"))

    assert outcome.usage.input_tokens < 40
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("context_length_exceeded", "query")


def test_cancelled_request_ends_in_the_next_step(tmp_path: Path) -> None:
    driver = EngineDriver(RerankEngine(_spec(make_checkpoint(tmp_path / "bert"))))
    driver.take(_job("a", "dog", *DOCUMENTS))

    driver.engine.cancel(RequestId("a"), "client")
    driver.step()

    assert isinstance(driver.outcomes["a"], Cancelled)


@pytest.mark.usefixtures("single_layers")
def test_batch_is_interrupted_between_layers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "bert")
    driver = EngineDriver(RerankEngine(_spec(path)))

    outcome = _run(driver, _job("a", "who jumps", *DOCUMENTS))["a"]

    assert driver.steps > 2
    assert isinstance(outcome, Completed)
    assert outcome.output["scores"] == pytest.approx(
        _expected(path, "who jumps", DOCUMENTS)[0], abs=1e-5
    )
    driver.take(_job("b", "dog", *DOCUMENTS))
    driver.step()
    call = driver.engine._batches._call
    assert call is not None
    driver.engine.cancel(RequestId("b"), "client")
    driver.step()
    assert isinstance(driver.outcomes["b"], Cancelled)
    assert call._computation.dead
    assert driver.engine._batches._call is None


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "three", labels=3)

    with pytest.raises(ValueError, match="3 outputs"):
        RerankEngine(_spec(path)).inspect()


@pytest.mark.parametrize("family", MODELS)
def test_scores_in_bfloat16_are_near_those_of_the_library(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / family, family)
    driver = EngineDriver(RerankEngine(_spec(path, dtype="bfloat16")))

    found = _run(driver, _job("a", "who jumps", *DOCUMENTS))["a"].output["scores"]

    assert driver.engine.hardware.dtype == "bfloat16"
    expected, _ = _expected(path, "who jumps", DOCUMENTS)
    assert found == pytest.approx(expected, abs=0.02)
