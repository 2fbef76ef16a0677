"""Workflows end to end: one quote, one hold, one receipt; outputs flow from step to step."""

from __future__ import annotations

import base64
import struct
import time
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.artist import Artist, png, wav
from tests.gateway.test_requests import events
from tests.stack import Caller, Stack, ended, wait_for
from workers.contract.jobs import encode

PICTURE = "data:image/png;base64," + base64.b64encode(png(16, 16, 7)).decode()


def place(caller: Caller, model: str, **value: Any) -> httpx.Response:
    return caller.http.post("/v1/requests", json={"model": model, "input": value})


def placed(caller: Caller, model: str, **value: Any) -> str:
    answer = place(caller, model, **value)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def finished(caller: Caller, model: str, **value: Any) -> dict[str, Any]:
    return ended(caller, placed(caller, model, **value))


def receipt(caller: Caller, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    return found


def jobs_of(artist: Artist, request_id: str) -> list[Any]:
    return [job for job in artist.jobs if job.request_id.startswith(request_id)]


def test_generated_image_is_upscaled_by_the_next_step_on_one_receipt(
    stack: Stack, artist: Artist
) -> None:
    caller = stack.caller()

    found = finished(caller, "draw-then-enlarge", prompt="a red circle")

    assert (found["status"], found["cost"]) == ("succeeded", "0.0105"), found
    (picture,) = found["output"]["media"]
    assert httpx.get(picture["url"]).status_code == 200
    draw, enlarge = jobs_of(artist, found["id"])
    assert draw.input["prompt"] == "a red circle, plain"
    assert artist.attached[enlarge.request_id] == [png(64, 64, 5)]
    shown = receipt(caller, found["id"])
    assert [step["name"] for step in shown["steps"]] == ["draw", "enlarge"]
    assert [step["cost"] for step in shown["steps"]] == ["0.01", "0.0005"]
    assert [step["usage"]["images"] for step in shown["steps"]] == [1, 1]
    assert sum(Decimal(line["amount"]) for line in shown["lines"]) == Decimal(shown["cost"])
    assert shown["hold"] == "0.0105"
    assert stack.held(caller) == 0
    assert stack.findings() == []
    assert len(caller.http.get("/v1/requests").json()["data"]) == 1


def test_a_workflow_at_its_own_price_shows_its_steps_and_charges_none_of_them(
    stack: Stack, artist: Artist
) -> None:
    caller = stack.caller()

    found = finished(caller, "expand-then-draw", prompt="a cat")

    assert (found["status"], found["cost"]) == ("succeeded", "0.05"), found
    _, draw = jobs_of(artist, found["id"])
    assert draw.input["prompt"] == "Describe: a cat"
    shown = receipt(caller, found["id"])
    assert [step["cost"] for step in shown["steps"]] == ["0", "0"]
    assert shown["steps"][0]["usage"]["output_tokens"] == 3
    assert [line["unit"] for line in shown["lines"]] == ["request"]
    assert stack.findings() == []


def test_quote_is_the_sum_of_the_steps_maximum_costs(stack: Stack) -> None:
    caller = stack.caller()

    body = {"model": "both-then-blend", "input": {"one": "a", "other": "b"}}
    by_steps = caller.http.post("/v1/quote", json=body).json()
    body = {"model": "expand-then-draw", "input": {"prompt": "a"}}
    own = caller.http.post("/v1/quote", json=body).json()

    assert by_steps["max_cost"] == "0.035"
    assert [step["max_cost"] for step in by_steps["steps"]] == ["0.01", "0.02", "0.005"]
    assert own["max_cost"] == "0.05"
    # 60 tokens out; of a text in, each byte may be a token.
    assert Decimal(own["steps"][0]["max_cost"]) > Decimal("0.00018")


def test_independent_steps_run_concurrently(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()

    request_id = placed(caller, "both-then-blend", one="!slow a", other="!slow b")

    wait_for(lambda: len(jobs_of(artist, request_id)) == 2, "both to run")
    caller.http.post(f"/v1/requests/{request_id}/cancel")
    assert ended(caller, request_id)["status"] == "cancelled"


def test_step_reads_images_of_several_steps_and_one_input(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()

    found = finished(caller, "both-then-blend", one="a", other="b", extra=PICTURE)

    assert (found["status"], found["cost"]) == ("succeeded", "0.035")
    blended = jobs_of(artist, found["id"])[-1]
    sizes = [struct.unpack(">II", data[16:24]) for data in artist.attached[blended.request_id]]
    assert sizes == [(64, 64), (128, 64), (16, 16)]
    assert stack.findings() == []


def test_conditional_step_runs_only_if_its_condition_holds(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()

    plain = finished(caller, "maybe-redraw", image=PICTURE)
    changed = finished(caller, "maybe-redraw", image=PICTURE, change="blue")

    assert (plain["cost"], changed["cost"]) == ("0.0005", "0.0105")
    (enlarge,) = jobs_of(artist, plain["id"])
    assert artist.attached[enlarge.request_id] == [png(16, 16, 7)]
    assert len(receipt(caller, changed["id"])["steps"]) == 2


def test_synthesised_speech_is_passed_to_a_portrait_by_reference(
    stack: Stack, artist: Artist
) -> None:
    caller = stack.caller()

    found = finished(caller, "person", image=PICTURE, text="Good day.")

    # Nine characters, and two seconds of video.
    assert (found["status"], found["cost"]) == ("succeeded", "0.0209"), found
    assert [one["kind"] for one in found["output"]["media"]] == ["video", "image"]
    speak, show = jobs_of(artist, found["id"])
    assert (speak.input["text"], speak.input["format"]) == ("Good day.", "wav")
    assert artist.attached[show.request_id] == [png(16, 16, 7), wav(1000)]
    assert [ref.content_type for ref in show.attachments] == ["image/png", "audio/wav"]
    assert len(encode(show)) < 2000
    # Audio events of a step are not delivered, so only the last step streams: its progress.
    assert (speak.stream, show.stream) == (False, True)
    shown = receipt(caller, found["id"])
    assert [(step["name"], step["cost"]) for step in shown["steps"]] == [
        ("speak", "0.0009"),
        ("show", "0.02"),
    ]
    assert shown["usage"]["video_ms"] == 2000
    assert (stack.held(caller), stack.findings()) == (0, [])


def test_attached_speech_skips_the_speech_step(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()
    said = "data:audio/wav;base64," + base64.b64encode(wav(500)).decode()

    found = finished(caller, "person", image=PICTURE, audio=said)

    assert (found["status"], found["cost"]) == ("succeeded", "0.02"), found
    (show,) = jobs_of(artist, found["id"])
    assert artist.attached[show.request_id] == [png(16, 16, 7), wav(500)]
    assert [step["name"] for step in receipt(caller, found["id"])["steps"]] == ["show"]


def test_portrait_without_speech_or_text_is_refused(stack: Stack) -> None:
    caller = stack.caller()

    answer = place(caller, "person", image=PICTURE)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "missing_required_parameter"
    assert stack.held(caller) == 0


def test_run_whose_speech_step_fails_or_is_cancelled_is_not_charged(
    stack: Stack, artist: Artist
) -> None:
    caller = stack.caller()

    slow = placed(caller, "person", image=PICTURE, text="!slow")
    wait_for(lambda: bool(jobs_of(artist, slow)), "the speech to run")
    cancelled = caller.http.post(f"/v1/requests/{slow}/cancel").json()
    failed = finished(caller, "person", image=PICTURE, text="!fail")

    assert (cancelled["status"], cancelled["cost"]) == ("cancelled", "0")
    assert (failed["status"], failed["cost"]) == ("failed", "0")
    assert "speak (speak) failed 2 times" in failed["error"]["message"]
    assert [step["status"] for step in receipt(caller, slow)["steps"]] == ["stopped", "not_run"]
    assert [step["attempts"] for step in receipt(caller, failed["id"])["steps"]] == [2, 0]
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
    assert (stack.held(caller), stack.findings()) == (0, [])


def test_step_with_transient_failures_is_retried_and_charged_once(stack: Stack) -> None:
    caller = stack.caller()

    found = finished(caller, "draw-then-enlarge", prompt=f"!flaky {time.time_ns()}")

    assert (found["status"], found["cost"]) == ("succeeded", "0.0105"), found
    assert [step["attempts"] for step in receipt(caller, found["id"])["steps"]] == [2, 1]
    assert stack.findings() == []


def test_nothing_is_charged_when_a_later_step_fails(stack: Stack) -> None:
    caller = stack.caller()

    # The second step of this run fails, and the first step of the next.
    found = finished(caller, "draw-then-enlarge", prompt="a", style="!fail")
    expanded = finished(caller, "expand-then-draw", prompt="!fail")

    assert (found["status"], found["cost"]) == ("failed", "0")
    assert "draw (draw) failed 2 times" in found["error"]["message"]
    assert (expanded["status"], expanded["cost"]) == ("failed", "0")
    shown = receipt(caller, found["id"])
    assert [step["status"] for step in shown["steps"]] == ["failed", "not_run"]
    assert stack.held(caller) == 0
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
    assert stack.findings() == []


def test_words_that_the_model_of_a_step_does_not_know_are_reported(stack: Stack) -> None:
    caller = stack.caller()

    first = place(caller, "write-then-sketch", prompt="a red cat", **{"not": "teal"}).json()
    found = ended(caller, first["id"])
    failed = finished(caller, "write-then-sketch", prompt="a cat")

    fields = [(one["field"], one["unknown"]) for one in found["warnings"]]
    assert fields == [("input.not", ["teal"]), ("steps.sketch.prompt", ["cat"])]
    assert first["warnings"] == found["warnings"][:1]
    assert (failed["status"], failed["cost"]) == ("failed", "0")
    assert failed["error"]["code"] == "prompt_not_understood"


def test_cancelled_run_stops_its_steps_and_is_not_charged(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()
    request_id = placed(caller, "draw-then-enlarge", prompt="!slow")
    wait_for(lambda: bool(jobs_of(artist, request_id)), "the first step to run")
    assert caller.http.get(f"/v1/requests/{request_id}").json()["status"] == "running"

    answer = caller.http.post(f"/v1/requests/{request_id}/cancel").json()

    assert (answer["status"], answer["cost"]) == ("cancelled", "0")
    assert [step["status"] for step in receipt(caller, request_id)["steps"]] == [
        "stopped",
        "not_run",
    ]
    assert stack.held(caller) == 0
    assert stack.findings() == []
    time.sleep(1)
    assert len(jobs_of(artist, request_id)) == 1


def test_deadline_applies_to_the_whole_run(stack: Stack) -> None:
    caller = stack.caller()

    found = finished(caller, "short", prompt="!slow")

    assert (found["status"], found["cost"]) == ("expired", "0")
    assert stack.held(caller) == 0


def test_follower_receives_progress_of_each_step(stack: Stack) -> None:
    caller = stack.caller()
    request_id = placed(caller, "draw-then-enlarge", prompt="a")

    heard = [data for _, data in events(caller, request_id)]

    assert heard[-1]["event"] == "succeeded"
    progress = [data for data in heard if data["event"] == "progress"]
    stages = [data["stage"]["name"] for data in progress if data.get("stage")]
    assert stages == sorted(stages)
    assert set(stages) == {"draw", "enlarge"}
    assert {data["steps"] for data in progress} == {2}
    assert any(data["stage"].get("steps") == 2 for data in progress if data.get("stage"))
    assert [data["step"] for data in progress] == sorted(data["step"] for data in progress)
    again = [data for _, data in events(caller, request_id)]
    assert again[-1]["event"] == "succeeded"


def test_image_workflow_is_available_in_openais_images_api(stack: Stack) -> None:
    caller = stack.caller()

    answer = caller.http.post(
        "/v1/images/generations", json={"model": "draw-then-enlarge", "prompt": "a circle"}
    )
    refused = caller.http.post(
        "/v1/images/generations",
        json={"model": "draw-then-enlarge", "prompt": "a", "size": "64x64"},
    )

    assert answer.status_code == 200, answer.text
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]).startswith(b"\x89PNG")
    assert answer.headers["x-request-cost"] == "0.0105"
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "size"


def test_alias_and_listing_name_the_models_of_the_steps(stack: Stack) -> None:
    caller = stack.caller()

    found = finished(caller, "acme/big", prompt="a")
    entry = caller.http.get("/v1/catalog/draw-then-enlarge").json()
    own = caller.http.get("/v1/catalog/expand-then-draw").json()

    assert (found["model"], found["ordered_as"]) == ("draw-then-enlarge", "acme/big")
    assert (entry["route"], entry["available"]) == ("workflow", True)
    assert [step["model"] for step in entry["workflow"]["steps"]] == ["draw", "enlarge"]
    assert entry["workflow"]["priced_by"] == "steps"
    assert own["workflow"]["priced_by"] == "workflow"
    assert caller.http.get("/v1/models").is_success
    for sort in ("price", "-price", "name"):
        assert caller.http.get("/v1/catalog", params={"sort": sort}).is_success


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ({}, "missing_required_parameter", "input.prompt"),
        ({"prompt": "a", "size": "1x1"}, "unknown_parameter", "input.size"),
        ({"prompt": 3}, "invalid_value", "input.prompt"),
        ({"prompt": "a" * 32_001}, "invalid_value", "input.prompt"),
    ],
)
def test_unknown_workflow_input_is_refused_without_a_hold(
    stack: Stack, value: dict[str, Any], code: str, param: str
) -> None:
    caller = stack.caller()

    answer = place(caller, "draw-then-enlarge", **value)

    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)
    assert stack.held(caller) == 0


def test_run_without_credit_for_all_steps_is_refused(stack: Stack, artist: Artist) -> None:
    caller = stack.caller(credit="0.0104")
    before = len(artist.jobs)

    answer = place(caller, "draw-then-enlarge", prompt="a")

    assert answer.status_code == 402
    assert len(artist.jobs) == before


def test_files_of_all_steps_are_deleted_with_the_request(stack: Stack) -> None:
    caller = stack.caller()
    found = finished(caller, "draw-then-enlarge", prompt="a")
    folder = stack.directory / "blobs" / str(caller.account_id)
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2
    assert [path.name for path in folder.iterdir()] == [found["id"]]
