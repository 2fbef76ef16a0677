"""Crashes while speech is synthesised: the audio continues identically and is charged once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.failures.conftest import mended, own_stack
from tests.gateway.test_generated_audio import seconds
from tests.stack import Caller, Stack, ended, wait_for
from tests.workers.speech.checkpoints import make_checkpoint

TEXT = "Good night to all of you who are still awake. " * 120
PRICE = Decimal("0.0001")
MODEL = """\
  - name: tiny-speech
    task: text-to-speech
    engine: speech
    checkpoint: {checkpoint}
    options: {{threads: 1}}
    price: [{{unit: character, amount: "0.0001"}}]
"""
LOADING_S = 150.0
"""A lease lapses, another process starts and loads the model again."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Stack]:
    tmp_path = tmp_path_factory.mktemp("speaking")
    checkpoint = make_checkpoint("vits", tmp_path / "tiny")
    models = MODEL.format(checkpoint=checkpoint)
    with own_stack(tmp_path, postgres, more_models=models) as made:
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    yield from mended(shared)


@contextlib.contextmanager
def speaking(caller: Caller, **more: Any) -> Iterator[httpx.Response]:
    """A stream of a long text. Bare samples, since every other form names its request."""
    body = {"model": "tiny-speech", "input": TEXT, "response_format": "pcm", "seed": 7, **more}
    with caller.http.stream("POST", "/v1/audio/speech", json=body, timeout=LOADING_S) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer


def all_is_well(stack: Stack, caller: Caller, *, spoken: int) -> None:
    """Nothing is held, the books agree, and the bill is right to the last digit."""
    cost = spoken * len(TEXT) * PRICE
    assert stack.held(caller) == 0
    assert stack.findings() == []
    usage = caller.http.get("/v1/usage").json()["total"]
    assert (usage["charged_requests"], Decimal(usage["cost"])) == (spoken, cost)
    assert Decimal(caller.http.get("/v1/balance").json()["posted"]) == 10 - cost


@pytest.mark.parametrize("who", ["engine", "worker"])
def test_stream_resumes_at_the_same_byte_after_a_crash(who: str, stack: Stack) -> None:
    caller = stack.caller(credit="10")
    with speaking(caller) as answer:
        undisturbed = answer.read()
    with speaking(caller) as answer:
        chunks = answer.iter_bytes(4096)
        heard = next(chunks)
        request_id = answer.headers["x-request-id"]
        assert caller.http.get(f"/v1/requests/{request_id}").json()["status"] == "running"

        if who == "engine":
            stack.kill_engine()
        else:
            stack.kill("worker")
            stack.start_worker()
        heard += b"".join(chunks)

    assert heard == undisturbed
    found = ended(caller, request_id, patience_s=LOADING_S)
    assert found["status"] == "succeeded"
    all_is_well(stack, caller, spoken=2)


def test_speech_is_completed_after_a_gateway_crash(stack: Stack) -> None:
    caller = stack.caller(credit="10")
    with speaking(caller) as answer:
        chunks = answer.iter_bytes(4096)
        next(chunks)
        request_id = answer.headers["x-request-id"]
        stack.kill("gateway")
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)

    stack.start_gateway()

    (medium,) = ended(caller, request_id, patience_s=LOADING_S)["output"]["media"]
    whole = caller.http.get(f"/v1/requests/{request_id}/sound").content
    assert seconds(whole, "pcm", rate=24_000) == pytest.approx(
        medium["duration_ms"] / 1000, abs=0.01
    )
    all_is_well(stack, caller, spoken=1)


def test_audio_of_a_cancelled_request_ends_with_a_broken_connection(stack: Stack) -> None:
    caller = stack.caller(credit="10")
    with speaking(caller) as answer:
        chunks = answer.iter_bytes(4096)
        next(chunks)
        request_id = answer.headers["x-request-id"]
        caller.http.post(f"/v1/requests/{request_id}/cancel")
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)

    found = ended(caller, request_id)
    wait_for(lambda: stack.held(caller) == 0, "the hold to end")
    assert found["status"] == "cancelled"
    assert 0 < Decimal(found["cost"]) < len(TEXT) * PRICE
    assert stack.findings() == []
