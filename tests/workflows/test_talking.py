"""A text becomes speech and a talking head, by real models: one receipt, one video."""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest

from tests.databases import Databases
from tests.stack import Caller, Stack, ended
from tests.workers.speech.checkpoints import make_checkpoint
from tests.workers.talking.driver import person, png, speech, wav

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
"""Two engines are loaded, and each request is some seconds of one core."""
CATALOG = """\
version: 1
models:
  - name: voice
    task: text-to-speech
    engine: speech
    checkpoint: {voice}
    options: {{device: cpu, threads: 1, slots: 2}}
    limits: {{characters: 200, seconds: 20}}
    price: [{{unit: character, amount: "0.0001"}}]
  - name: head
    task: talking-head
    engine: talking
    checkpoint: {root}/workers/pocket/talking
    options: {{device: cpu, threads: 1, fps: 10}}
    limits: {{seconds: 20, fps: 30}}
    price: [{{unit: video_second, amount: "0.001"}}]
  - name: person
    task: talking-head
    price: steps
    workflow:
      inputs:
        image: {{type: image}}
        text: {{type: text, optional: true}}
        audio: {{type: audio, optional: true}}
      steps:
        - name: speak
          model: voice
          when: inputs.text
          input: {{text: "${{inputs.text}}", format: wav}}
        - name: show
          model: head
          input: {{image: "${{inputs.image}}", audio: "${{steps.speak | inputs.audio}}"}}
          retries: 1
      output: ${{steps.show}}
"""


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("talking")
    voice = make_checkpoint("vits", directory / "voice")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(voice=voice, root=ROOT))
    made = Stack(directory, url, valkey, f"t{uuid.uuid4().hex[:8]}", catalog)
    try:
        made.start_worker()
        made.start_gateway()
        made.wait_for_model("person", patience_s=PATIENCE_S)
        yield made
    finally:
        made.stop()


def _finished(caller: Caller, **value: Any) -> dict[str, Any]:
    answer = caller.http.post("/v1/requests", json={"model": "person", "input": value})
    assert answer.status_code == 202, answer.text
    return ended(caller, answer.json()["id"], patience_s=PATIENCE_S)


def _data(data: bytes, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def test_text_becomes_a_talking_head_on_one_receipt(stack: Stack) -> None:
    caller = stack.caller()

    found = _finished(caller, image=_data(png(person()[0]), "image/png"), text="Good day to you.")

    assert found["status"] == "succeeded", found
    video = next(one for one in found["output"]["media"] if one["role"] == "output")
    data = httpx.get(video["url"]).content
    with av.open(io.BytesIO(data)) as container:
        assert [stream.codec_context.name for stream in container.streams] == ["h264", "aac"]
        seconds = float(container.duration or 0) / 1_000_000
    assert seconds == pytest.approx(video["duration_ms"] / 1000, abs=0.1)
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    speak, show = receipt["steps"]
    assert (speak["model"], speak["cost"]) == ("voice", "0.0016")
    assert (show["model"], show["usage"]["video_ms"]) == ("head", video["duration_ms"])
    assert Decimal(receipt["cost"]) == Decimal(speak["cost"]) + Decimal(show["cost"])
    assert show["timings"]["forward_us"] > 0
    assert (stack.held(caller), stack.findings()) == (0, [])


def test_recording_becomes_a_talking_head_without_a_speech_step(stack: Stack) -> None:
    caller = stack.caller()
    said = speech(0.8)

    found = _finished(
        caller,
        image=_data(png(person(2)[0]), "image/png"),
        audio=_data(wav(said.samples), "audio/wav"),
    )

    assert (found["status"], found["cost"]) == ("succeeded", "0.0008"), found
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    assert [step["name"] for step in receipt["steps"]] == ["show"]


def test_missing_speech_is_reported_by_the_inputs_of_the_workflow(stack: Stack) -> None:
    image = _data(png(person()[0]), "image/png")

    answer = stack.caller().http.post(
        "/v1/requests", json={"model": "person", "input": {"image": image}}
    )

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].endswith("send input.text or input.audio.")
    assert error["param"] == "input.text"


def test_run_that_fails_after_speech_synthesis_is_not_charged(stack: Stack) -> None:
    caller = stack.caller()
    plain = png(np.full((64, 64, 3), 128, np.uint8))

    found = _finished(caller, image=_data(plain, "image/png"), text="Hello.")

    assert (found["status"], found["cost"]) == ("failed", "0"), found
    assert found["error"]["code"] == "invalid_input"
    assert "The step show (head) failed: No mouth" in found["error"]["message"]
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    assert [(step["status"], step["attempts"]) for step in receipt["steps"]] == [
        ("succeeded", 1),
        ("failed", 1),
    ]
    assert [step["cost"] for step in receipt["steps"]] == ["0", "0"]
    assert (stack.held(caller), stack.findings()) == (0, [])
