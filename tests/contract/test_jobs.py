"""Recorded messages must always decode: ``recorded.json`` is only ever extended.

The recordings are of version 1. They represent messages of older processes, and messages in a queue
during an upgrade.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from workers.contract.attempts import RunDetails, UnreadResult
from workers.contract.jobs import (
    AudioChunk,
    BlobRef,
    Cancelled,
    ChatInput,
    ChatMessage,
    Choice,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    Preview,
    Progress,
    RequestId,
    SentEvent,
    Settled,
    Sketch,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
    decode_frame,
    decode_job,
    decode_outcome,
    encode,
)

RECORDED: Final[dict[str, str]] = json.loads(
    (Path(__file__).parent / "recorded.json").read_text(encoding="ascii")
)


def _plain(message: msgspec.Struct) -> Any:
    """Convert a message to plain data, as a reader without its type decodes it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


REQUEST = RequestId("req_0190f3b5c1d27f3e8a4b5c6d7e8f9012")
BLOB = BlobRef("acc/req/c0ffee-1/0", 1234, "ab" * 32, "image/png")
USAGE = Usage(
    requests=1,
    input_tokens=12,
    cached_input_tokens=3,
    output_tokens=45,
    images=2,
    video_ms=4000,
    audio_ms=5000,
    characters=67,
    steps=30,
    gpu_us=890_123,
    attributes={"size": "1024x1024"},
)
TIMINGS = Timings(
    queue_us=1,
    load_us=2,
    preprocess_us=3,
    transfer_us=4,
    forward_us=5,
    postprocess_us=6,
    first_token_us=7,
    total_us=8,
    tokens=9,
)
LOGPROBS = (TokenLogprob("Hi", -0.25, (("Hi", -0.25), ("Ho", -1.5))),)
CHAT = ChatInput(
    (ChatMessage("system", "Be brief."), ChatMessage("user", "héllo")),
    16,
    seed=7,
    n=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    frequency_penalty=0.1,
    presence_penalty=-0.1,
    repetition_penalty=1.1,
    logit_bias={5: -1.5},
    stop=("\n\n",),
    logprobs=True,
    top_logprobs=2,
    response_format={"type": "json_object"},
)
CHOICE = Choice(0, "Hi", "stop", LOGPROBS)

JOBS = {
    "job": Job(
        REQUEST,
        "acc_1",
        "tiny/chat",
        "text-generation",
        _plain(CHAT),
        limits=USAGE,
        stream=True,
        deadline_ms=1_795_000_000_000,
        attachments=(BLOB,),
    ),
    "smallest job": Job(REQUEST, "acc_1", "m", "t", {}),
}
FRAMES = {
    "started": (SentEvent(REQUEST, 2, 1, Started("worker-1", 2)),),
    "tokens": (
        SentEvent(REQUEST, 1, 2, Tokens(0, "Hi there", 2, LOGPROBS, "stop")),
        SentEvent(REQUEST, 1, 3, Tokens(1, "x", 1)),
    ),
    "progress": (
        SentEvent(REQUEST, 1, 4, Progress(10, 30, 1500)),
        SentEvent(REQUEST, 1, 5, Progress(11, 30)),
    ),
    "preview": (SentEvent(REQUEST, 1, 6, Preview(0, BLOB)),),
    "sound": (SentEvent(REQUEST, 1, 7, AudioChunk(0, 4096, b"\x00\xff\x7f", 125)),),
    "settled": (SentEvent(REQUEST, 0, 0, Settled()),),
}
OUTCOMES: dict[str, Outcome] = {
    "completed": Completed(
        USAGE, TIMINGS, {"choices": [_plain(CHOICE)]}, (BLOB,), worker="worker-1"
    ),
    "smallest completed": Completed(Usage()),
    "failed": Failed(
        "context_length_exceeded",
        "too long",
        "messages",
        Usage(input_tokens=1),
        Timings(queue_us=1),
        "worker-1",
    ),
    "smallest failed": Failed("engine_error", "broke"),
    "cancelled": Cancelled(
        "deadline",
        True,
        Usage(output_tokens=4),
        Timings(forward_us=9),
        {"choices": []},
        "worker-1",
    ),
    "smallest cancelled": Cancelled("client"),
    "completed with details": Completed(
        Usage(requests=1),
        worker="worker-1",
        details=RunDetails("NVIDIA H200", "bfloat16", 8, "gmi.example.com"),
    ),
    "unread result": Failed(
        "upstream_error",
        "no image",
        usage=Usage(requests=1),
        unread=UnreadResult("no image", "r-1", "their-name", "gmi.example.com", '{"seed":7}'),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_recorded_job_decodes(name: str) -> None:
    assert decode_job(bytes.fromhex(RECORDED[name])) == JOBS[name]


@pytest.mark.parametrize("name", FRAMES)
def test_a_recorded_frame_decodes(name: str) -> None:
    assert decode_frame(bytes.fromhex(RECORDED[name])) == FRAMES[name]


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_recorded_outcome_decodes(name: str) -> None:
    found = decode_outcome(bytes.fromhex(RECORDED[name]))

    assert found == OUTCOMES[name]


def test_the_recorded_input_and_output_of_a_chat_are_understood() -> None:
    job = decode_job(bytes.fromhex(RECORDED["job"]))
    outcome = decode_outcome(bytes.fromhex(RECORDED["completed"]))

    assert isinstance(outcome, Completed)
    assert msgspec.convert(job.input, ChatInput) == CHAT
    assert msgspec.convert(outcome.output["choices"], list[Choice]) == [CHOICE]


@pytest.mark.parametrize("message", [*JOBS.values(), *FRAMES.values(), *OUTCOMES.values()])
def test_encoded_message_decodes_to_itself(message: Any) -> None:
    decode = {Job: decode_job, tuple: decode_frame}.get(type(message), decode_outcome)

    assert decode(encode(message)) == message


def test_every_kind_of_message_is_recorded() -> None:
    events = {type(event.event) for frame in FRAMES.values() for event in frame}

    assert events == set(get_args(Event)) - {Sketch}  # never leaves a worker
    assert {type(outcome) for outcome in OUTCOMES.values()} == set(get_args(Outcome))
    assert RECORDED.keys() == JOBS.keys() | FRAMES.keys() | OUTCOMES.keys()


@pytest.mark.parametrize("name", ["job", "completed", "failed", "cancelled"])
def test_unknown_field_of_a_later_version_is_ignored(name: str) -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED[name]))
    later = msgspec.msgpack.encode({**fields, "invented_later": [1, {"a": None}]})

    found = decode_job(later) if name == "job" else decode_outcome(later)

    assert found == (JOBS | OUTCOMES)[name]


@pytest.mark.parametrize("decode", [decode_job, decode_frame, decode_outcome])
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x91\x01", b"not a message"])
def test_malformed_message_is_refused(decode: Any, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)
