"""Transcripts by the unmodified OpenAI client, in every format, charged by the second."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import openai
import pytest

from tests.stack import Caller, Stack, ended, wait_for
from tests.workers.transcription.checkpoints import sound, wav

LONG = wav(sound(7.3, 3))
SHORT = wav(sound(1.5, 4))


def _client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def _spent(caller: Caller) -> tuple[Decimal, Decimal]:
    balance = caller.http.get("/v1/balance").json()
    return 1 - Decimal(balance["posted"]), Decimal(balance["held"])


def test_every_format_tells_the_same_text_and_seconds_are_charged(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    create = _client(speech_stack, caller).audio.transcriptions.create
    sent: Any = {"model": "scribe", "file": ("talk.wav", LONG), "language": "de"}

    plain = create(**sent)
    verbose = create(
        **sent, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    text = create(**sent, response_format="text")
    srt = create(**sent, response_format="srt")
    vtt = create(**sent, response_format="vtt")

    assert plain.text
    assert plain.usage is not None
    assert plain.usage.type == "duration"
    assert plain.usage.seconds == 7.3
    assert text == f"{plain.text}\n"
    assert verbose.text == plain.text
    assert (verbose.language, verbose.duration) == ("german", 7.3)
    assert verbose.segments
    assert verbose.words
    assert "".join(one.text for one in verbose.segments).lstrip() == plain.text
    assert all(one.start <= one.end <= 7.3 for one in (*verbose.segments, *verbose.words))
    cues = str(srt).strip().split("\n\n")
    assert [cue.split("\n")[0] for cue in cues] == [
        str(number + 1) for number in range(len(verbose.segments))
    ]
    assert "00:00:00,400 --> " in cues[0]
    assert str(vtt).startswith("WEBVTT\n\n00:00:00.400 --> ")
    assert _spent(caller) == (5 * Decimal("0.00073"), 0)


def test_translation_is_named_and_takes_no_language(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    create = _client(speech_stack, caller).audio.translations.create

    with pytest.deprecated_call():
        found = create(model="whisper-1", file=("a.wav", SHORT), response_format="verbose_json")
    assert found.model_extra is not None
    assert found.model_extra["task"] == "translate"
    with pytest.deprecated_call(), pytest.raises(openai.BadRequestError, match="language"):
        create(model="scribe", file=("a.wav", SHORT), extra_body={"language": "de"})


def test_stream_sends_the_text_in_parts_and_then_as_a_whole(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    create = _client(speech_stack, caller).audio.transcriptions.create

    stream = create(model="scribe", file=("a.wav", LONG), language="de", stream=True)
    events = list(stream)

    *deltas, done = events
    assert len(deltas) > 1
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text
    usage: Any = done.usage
    assert usage.seconds == 7.3
    assert _spent(caller) == (Decimal("0.00073"), 0)


def test_hold_covers_the_seconds_of_the_file_and_not_the_limit(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="0.0008")

    found = caller.http.post(
        "/v1/audio/transcriptions", data={"model": "scribe"}, files={"file": ("a.wav", LONG)}
    )

    assert found.status_code == 200, found.text
    assert Decimal(found.headers["x-request-cost"]) == Decimal("0.00073")
    refused = caller.http.post(
        "/v1/audio/transcriptions", data={"model": "scribe"}, files={"file": ("a.wav", SHORT)}
    )
    assert refused.status_code == 402, refused.text


@pytest.mark.parametrize(
    ("fields", "data", "status", "code", "param"),
    [
        ({}, None, 400, "missing_required_parameter", "file"),
        ({}, b"", 400, "empty_file", "file"),
        ({}, b"not a recording at all, but a text" * 9, 400, "unsupported_media_type", "file"),
        ({}, SHORT[:44], 400, "invalid_input", "file"),
        ({}, wav(sound(21.0)), 400, "invalid_value", "file"),
        ({"model": "reader"}, SHORT, 400, "task_not_supported", "model"),
        ({"language": "xx"}, SHORT, 400, "unsupported_parameter", "language"),
        ({"response_format": "diarized_json"}, SHORT, 400, "invalid_value", "response_format"),
        ({"response_format": "srt", "stream": "true"}, SHORT, 400, "invalid_value", None),
        ({"timestamp_granularities[]": "word"}, SHORT, 400, "invalid_value", None),
        ({"temperature": "2"}, SHORT, 400, "invalid_value", "temperature"),
        ({"include[]": "logprobs"}, SHORT, 400, "unsupported_parameter", "include"),
    ],
)
def test_what_cannot_be_transcribed_is_refused_by_name_and_free(
    fields: dict[str, str],
    data: bytes | None,
    status: int,
    code: str,
    param: str | None,
    speech_stack: Stack,
) -> None:
    caller = speech_stack.caller()

    answer = caller.http.post(
        "/v1/audio/transcriptions",
        data={"model": "scribe", **fields},
        files={"file": ("a.wav", data)} if data is not None else {"other": ("a", b"")},
    )

    if data is None:
        assert answer.status_code == 400
    else:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), answer.text
        assert param is None or error["param"] == param
    assert _spent(caller) == (0, 0)


def test_native_api_and_batches_take_a_recording(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    uri = f"data:audio/wav;base64,{base64.b64encode(SHORT).decode()}"
    given = {"audio": uri, "language": "de", "timestamps": "segment"}

    quote = caller.http.post("/v1/quote", json={"model": "scribe", "input": given}).json()
    accepted = caller.http.post("/v1/requests", json={"model": "scribe", "input": given})

    assert Decimal(quote["max_cost"]) == Decimal("0.002"), "a quote does not read the file"
    assert Decimal(accepted.json()["hold"]) == Decimal("0.00015")
    found = ended(caller, accepted.json()["id"])
    assert found["status"] == "succeeded", found
    assert found["output"]["transcript"]["duration_ms"] == 1500
    assert found["output"]["choices"][0]["text"]
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/audio/transcriptions",
        "body": {"model": "scribe", "file": uri, "language": "de", "response_format": "srt"},
    }
    client = _client(speech_stack, caller)
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/audio/transcriptions",  # type: ignore[arg-type]
        completion_window="24h",
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    ran = client.batches.retrieve(batch.id)
    assert ran.output_file_id is not None
    result = json.loads(client.files.content(ran.output_file_id).text)
    assert result["response"]["body"]["text"].startswith("1\n00:00:")
