"""What was delivered is charged and nothing else, however a request ends.

First the rule itself, over everything that can be delivered and every way to end; then the same
with real processes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from gateway.pricing import parse_usd
from gateway.requests.settle import decode_delivery
from gateway.requests.streamed import read_streamed
from tests.databases import Databases
from tests.failures.conftest import mended
from tests.servers import queue_server
from tests.stack import Caller, Stack, chat, ended, order, running
from workers.contract.delivered import Tally, chargeable
from workers.contract.jobs import (
    AudioChunk,
    BlobRef,
    Cancelled,
    Completed,
    Event,
    Failed,
    Outcome,
    Preview,
    Progress,
    RequestId,
    SentEvent,
    Tokens,
    Usage,
    encode,
)
from workers.contract.streams import Delivery

pytestmark = pytest.mark.timeout(400)  # engines are loaded again after they were killed
REQUEST = RequestId("req_" + 32 * "0")
BLOB = BlobRef("1/req_0/n/0", 3, 64 * "0", "image/png")
READ = Usage(requests=1, input_tokens=20, cached_input_tokens=10)
WORDS = " ".join(f"w{number}" for number in range(200))
POCKET = Path(__file__).parents[2] / "workers" / "pocket"
PICTURES = f"""\
  - name: pictures
    task: text-to-image
    engine: diffusion
    checkpoint: {POCKET / "image"}
    options: {{slots: 4}}
    sizes: ["64x64"]
    limits: {{images: 4, steps: 1000, guidance: 10, characters: 500}}
    default_parameters: {{steps: 400, guidance: 1}}
    price: [{{unit: image, amount: "0.01"}}]
"""


# --- The rule -------------------------------------------------------------------------------------

progress = st.builds(Progress, st.integers(0, 9), st.just(9))
texts = st.lists(
    st.builds(
        lambda index, count: Tokens(index, "x" * count, count, usage=READ),
        st.integers(0, 2),
        st.integers(0, 5),
    )
    | progress
)
sounds = st.lists(
    st.builds(
        lambda number, data: AudioChunk(0, number, data, 100 * number, 7 * number),
        st.integers(1, 9),
        st.sampled_from([b"", b"sound"]),
    )
    | progress
)
pictures = st.lists(
    st.builds(lambda output, full: Preview(output, BLOB, 0, full), st.integers(0, 3), st.booleans())
    | progress
)
nothing = st.lists(progress)
"""Embeddings, videos, upscaled pictures, talking heads, steps of workflows, whatever is not
streamed and all lines of batches: nothing is sent before the end."""
MEASURED = {
    # Measured by an engine beside what it streamed; finished images were not sent.
    "text": Usage(requests=1, input_tokens=18, cached_input_tokens=12),
    "sound": Usage(requests=1),
    "pictures": Usage(requests=1, images=4, steps=31),
    "nothing": Usage(requests=1, input_tokens=9, images=2, video_ms=700, steps=12),
}
ends = st.sampled_from(
    [
        "completed",
        "client",
        "operator",
        "deadline",
        "engine_error",
        "out_of_memory",
        "output_too_large",
        "upstream_error",
        # Without an outcome: the worker is gone.
        "lost: dead",
        "lost: expired",
        "lost: cancelled",
    ]
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, str, list[list[Event]], bool]:
    """A modality, a way to end, the events of each attempt, and whether the last one's host still
    knew what it had sent."""
    kind = draw(st.sampled_from(["text", "sound", "pictures", "nothing"]))
    events = {"text": texts, "sound": sounds, "pictures": pictures, "nothing": nothing}[kind]
    attempts = draw(st.lists(events, min_size=1, max_size=3))
    return kind, draw(ends), attempts, draw(st.booleans())


def outcome_of(kind: str, end: str, events: Sequence[Event]) -> Outcome | None:
    """The outcome as hosts and agents report it."""
    if end.startswith("lost"):
        return None
    if end == "completed":
        return Completed(MEASURED[kind])
    outcome: Failed | Cancelled
    if end in ("client", "operator", "deadline"):
        outcome = Cancelled(end, usage=MEASURED[kind])  # type: ignore[arg-type]
    else:
        outcome = Failed(end, "It failed.", usage=Usage())  # type: ignore[arg-type]
    tally = Tally()
    for event in events:
        tally.record(event)
    if tally.has_delivered:
        usage = chargeable(outcome.usage, tally.usage())
        outcome = msgspec.structs.replace(outcome, delivered=True, usage=usage)
    return outcome


@given(runs())
def test_charge_equals_what_was_delivered(
    run: tuple[str, str, list[list[Event]], bool],
) -> None:
    kind, end, attempts, _ = run
    outcome = outcome_of(kind, end, attempts[-1])
    log = [
        SentEvent(REQUEST, attempt, seq, event)
        for attempt, events in enumerate(attempts, start=1)
        for seq, event in enumerate(events, start=1)
    ]
    status = {"lost: dead": "dead", "lost: expired": "expired", "lost: cancelled": "cancelled"}
    delivery = Delivery(
        "model",
        "1-0",
        REQUEST,
        status.get(end, "ok"),  # type: ignore[arg-type]
        len(attempts),
        b"" if outcome is None else encode(outcome),
        "",
        "",
    )

    settled = decode_delivery(delivery, read_streamed(log))

    reasons = {
        "lost: dead": ("failed", "worker_lost"),
        "lost: expired": ("expired", "deadline"),
        "lost: cancelled": ("cancelled", "client"),
        "completed": ("succeeded", "completed"),
        "client": ("cancelled", "client"),
        "operator": ("cancelled", "operator"),
        "deadline": ("expired", "deadline"),
    }
    assert (settled.status, settled.reason) == reasons.get(end, ("failed", end))
    if end == "completed":
        assert settled.billable
        assert settled.usage == MEASURED[kind]
        return
    # Each attempt repeats the one before, so the client has what the furthest of them sent.
    tokens = max(sum(e.count for e in one if isinstance(e, Tokens)) for one in attempts)
    audio_ms = max(
        next((e.duration_ms for e in reversed(one) if isinstance(e, AudioChunk) and e.data), 0)
        for one in attempts
    )
    shown = max(
        len({e.output for e in one if isinstance(e, Preview) and e.full}) for one in attempts
    )
    delivered = bool(tokens or audio_ms or shown)
    assert settled.billable == delivered
    if delivered:
        usage = settled.usage
        assert (usage.requests, usage.output_tokens, usage.audio_ms) == (1, tokens, audio_ms)
        assert (usage.images, usage.video_ms) == (shown, 0)
        read = usage.input_tokens + usage.cached_input_tokens
        assert read == (30 if tokens else 0)
        assert bool(usage.characters) == bool(audio_ms)


@given(st.lists(texts, min_size=1, max_size=3))
def test_without_its_log_a_lost_request_is_free(attempts: list[list[Event]]) -> None:
    delivery = Delivery("model", "1-0", REQUEST, "dead", len(attempts), b"", "worker lost", "")

    settled = decode_delivery(delivery, read_streamed(()))

    assert not settled.billable
    assert settled.reason == "worker_lost"


def test_undelivered_tokens_are_not_charged() -> None:
    """Those of a call are held back until it is whole; it may fail before."""
    tally = Tally()
    for event in (Tokens(0, "", 1, usage=READ), Tokens(0, "", 2)):
        tally.record(event)
    assert not tally.has_delivered

    tally.record(Tokens(0, "now", 1))

    assert tally.usage().output_tokens == 4


# --- With real processes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("delivered")
    url = Databases("sqlite", directory, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    with (
        queue_server("valkey") as queue,
        running(
            directory / "home", url, queue, namespace=name, more_models=PICTURES, patience_s=150
        ) as made,
    ):
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    for made in mended(shared):
        made.wait_for_model("pictures", patience_s=150)
        yield made


def receipt_of(caller: Caller, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    return found


def followed(caller: Caller, request_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the events of a request as they come."""
    with caller.http.stream("GET", f"/v1/requests/{request_id}/events") as answer:
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


def all_agrees(stack: Stack, caller: Caller) -> None:
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_stream_that_reaches_its_deadline_is_charged_and_ends_as_one_cut_at_its_length(
    stack: Stack,
) -> None:
    caller = stack.caller()
    text, finish, usage = "", None, None

    with OpenAI(api_key=caller.secret, base_url=f"{stack.url}/v1", max_retries=0) as client:
        for chunk in client.chat.completions.create(
            model="brief",
            messages=[{"role": "user", "content": WORDS}],
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish

    assert 0 < len(text.split()) < 200
    assert finish == "length"
    assert usage is not None
    assert usage.completion_tokens == len(text.split())
    receipt = receipt_of(caller, chunk.id)
    assert (receipt["status"], receipt["reason"]) == ("expired", "deadline")
    assert receipt["outcome"] == "charged"
    assert receipt["usage"]["output_tokens"] == len(text.split())
    assert parse_usd(receipt["cost"]) > 0
    all_agrees(stack, caller)


def test_unstreamed_request_is_free_at_its_deadline(stack: Stack) -> None:
    caller = stack.caller()

    answer = caller.http.post("/v1/chat/completions", json=chat("brief", WORDS, max_tokens=200))

    assert answer.status_code >= 400
    receipt = receipt_of(caller, answer.headers["x-request-id"])
    assert (receipt["status"], receipt["cost"]) == ("expired", "0")
    all_agrees(stack, caller)


def test_stream_that_fails_is_charged_for_what_it_sent(stack: Stack) -> None:
    caller = stack.caller()
    said, error = "", {}

    body = chat("slow", f"!fail late {WORDS}", stream=True, max_tokens=200)
    with caller.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                error = chunk.get("error", error)
                for choice in chunk.get("choices", ()):
                    said += choice["delta"].get("content") or ""

    assert error["code"] == "engine_error"
    found = ended(caller, error["request_id"])
    assert (found["status"], found["cost"]) == ("failed", error["cost"])
    assert found["output"]["choices"][0]["text"].strip() == said.strip() == "!fail"
    receipt = receipt_of(caller, error["request_id"])
    assert (receipt["outcome"], receipt["reason"]) == ("charged", "engine_error")
    assert receipt["usage"]["input_tokens"] == 202
    assert receipt["usage"]["output_tokens"] == 1
    all_agrees(stack, caller)


def test_dead_lettered_job_is_charged_for_what_its_workers_sent(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "slow", WORDS)
    sent: dict[int, int] = {}
    for name, data in followed(caller, request_id):
        if name == "tokens":
            attempt = data["attempt"]
            sent[attempt] = sent.get(attempt, 0) + data["count"]
            # Later attempts die earlier than the first: the client has the most.
            if sent[attempt] == {1: 40, 2: 15, 3: 15}[attempt]:
                stack.kill_engine()

    found = ended(caller, request_id, patience_s=100)

    assert (found["status"], found["error"]["code"]) == ("failed", "worker_lost")
    receipt = receipt_of(caller, request_id)
    assert (receipt["outcome"], receipt["reason"]) == ("charged", "worker_lost")
    charged = receipt["usage"]["output_tokens"]
    assert 30 <= charged <= sent[1]
    assert receipt["usage"]["input_tokens"] == 200
    assert len(found["output"]["choices"][0]["text"].split()) == charged
    all_agrees(stack, caller)


def test_request_cancelled_while_its_worker_is_unreachable_is_charged_for_what_was_sent(
    stack: Stack,
) -> None:
    caller = stack.caller()
    request_id = order(caller, "slow", WORDS)
    count = 0
    for name, data in followed(caller, request_id):
        count += data["count"] if name == "tokens" else 0
        if count == 20:
            break
    stack.kill("worker")

    caller.http.post(f"/v1/requests/{request_id}/cancel")
    stack.start_worker()
    found = ended(caller, request_id)

    assert found["status"] == "cancelled"
    assert 10 <= receipt_of(caller, request_id)["usage"]["output_tokens"] <= 40
    assert Decimal(found["cost"]) > 0
    all_agrees(stack, caller)


def test_request_whose_worker_and_log_are_lost_is_free(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "brief", WORDS)
    for name, _ in followed(caller, request_id):
        if name == "tokens":
            break
    stack.kill("worker")
    with redis.Redis.from_url(stack.redis_url) as server:
        server.flushall()
    stack.start_worker()

    found = ended(caller, request_id)

    assert found["status"] == "expired"
    receipt = receipt_of(caller, request_id)
    # What a second run delivered before the deadline is charged; the first run proves nothing.
    assert receipt["usage"].get("output_tokens", 0) <= 10
    all_agrees(stack, caller)


@pytest.mark.parametrize("surface", ["openai", "native"])
def test_image_whose_full_preview_was_delivered_is_charged(stack: Stack, surface: str) -> None:
    caller = stack.caller()
    if surface == "openai":
        body = {"model": "pictures", "prompt": "a red circle", "stream": True, "partial_images": 3}
        with caller.http.stream("POST", "/v1/images/generations", json=body) as answer:
            request_id = answer.headers["x-request-id"]
            for line in answer.iter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["partial_image_index"] == 2:
                    break
    else:
        placed = {"model": "pictures", "input": {"prompt": "a red circle", "previews": 3}}
        request_id = caller.http.post("/v1/requests", json=placed).json()["id"]
        for name, data in followed(caller, request_id):
            if name == "preview":
                assert data["full"]
                if data["index"] == 2:
                    break
        caller.http.post(f"/v1/requests/{request_id}/cancel")

    found = ended(caller, request_id)

    assert (found["status"], found["cost"]) == ("cancelled", "0.01")
    (medium,) = found["output"]["media"]
    assert medium["role"] == "preview"
    assert caller.http.get(medium["url"]).content.startswith(b"\x89PNG")
    receipt = receipt_of(caller, request_id)
    assert (receipt["outcome"], receipt["reason"]) == ("charged", "client")
    assert receipt["usage"]["images"] == 1
    all_agrees(stack, caller)


def test_cancelled_images_without_previews_are_free(stack: Stack) -> None:
    caller = stack.caller()
    body = {"model": "pictures", "input": {"prompt": "a red circle", "n": 2}}
    request_id = caller.http.post("/v1/requests", json=body).json()["id"]
    for name, _ in followed(caller, request_id):
        if name == "progress":
            break

    caller.http.post(f"/v1/requests/{request_id}/cancel")
    found = ended(caller, request_id)

    assert (found["status"], found["cost"]) == ("cancelled", "0")
    assert found["output"] is None
    all_agrees(stack, caller)
