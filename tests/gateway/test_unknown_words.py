"""Prompts outside of a model's vocabulary: refused without a charge, or answered with a warning."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.artist import Artist, at_work
from tests.databases import Databases
from tests.gateway.test_batches import client as batch_client
from tests.gateway.test_batches import ended as batch_ended
from tests.gateway.test_batches import results
from tests.gateway.test_files import client
from tests.gateway.test_media import DATA_URI, place, stored
from tests.gateway.test_media_batches import GENERATIONS, balance, body_of, draw, submit
from tests.stack import Stack, ended

CATALOG = Path(__file__).parents[2] / "catalog.yaml"
QUEUE = "/api/v1/ie/requestqueue/apikey/requests"
PROMPTS: list[tuple[str, Mapping[str, Any], list[str], bool]] = [
    # Model, input, unknown words, and whether anything is understood.
    ("pocket-image", {"prompt": "a photo of a cat"}, ["photo", "cat"], False),
    ("pocket-image", {"prompt": "ein roter Kreis"}, ["ein", "roter", "kreis"], False),
    ("pocket-image", {"prompt": "asdf qwer"}, ["asdf", "qwer"], False),
    ("pocket-image", {"prompt": "a teal star"}, ["teal"], True),
    ("pocket-image", {"prompt": "a gold heart"}, ["gold"], True),
    ("pocket-image", {"prompt": "a brown circle"}, ["brown"], True),
    (
        "pocket-image",
        {"prompt": "a cyan triangle above a beige square"},
        ["cyan", "beige"],
        True,
    ),
    ("pocket-image", {"prompt": "three red circles"}, ["three", "circles"], True),
    ("pocket-image", {"prompt": "a red hexagon"}, ["hexagon"], True),
    ("pocket-image", {"prompt": "a red circle inside a blue square"}, ["inside"], True),
    (
        "pocket-image",
        {"prompt": "a red circle and a blue square and a green star"},
        ["and"],
        True,
    ),
    ("pocket-image", {"prompt": "no red circle, just a blue square"}, ["no", "just"], True),
    (
        "pocket-image",
        {"prompt": "a product photo of a white sneaker"},
        ["product", "photo", "sneaker"],
        True,
    ),
    (
        "pocket-image",
        {"prompt": "make the elephant teal", "image": DATA_URI},
        ["elephant", "teal"],
        False,
    ),
    ("pocket-image", {"prompt": "make the circle brown", "image": DATA_URI}, ["brown"], True),
    ("pocket-video", {"prompt": "a dog runs on the beach"}, ["dog", "runs", "beach"], False),
    ("pocket-video", {"prompt": "a red circle rotates"}, ["rotates"], True),
    ("pocket-speech", {"text": "Guten Morgen, 日本語 😀"}, ["日本語", "😀"], True),
    ("pocket-speech", {"text": "😀"}, ["😀"], False),
    (
        "pocket-music",
        {"prompt": "a rap song about cats with saxophone and theremin"},
        ["rap", "about", "cats", "saxophone", "theremin"],
        True,
    ),
    ("pocket-music", {"prompt": "heavy metal"}, ["heavy", "metal"], False),
]

MODELS = ("pocket-image", "pocket-video", "pocket-speech", "pocket-music")


@pytest.fixture(scope="module")
def working(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    """A gateway with the shipped catalog, whose models are played by a worker without any."""
    directory = tmp_path_factory.mktemp("unknown")
    url = Databases("sqlite", directory, postgres).make()
    made = Stack(directory / "home", url, valkey, f"t{uuid.uuid4().hex[:8]}", CATALOG)
    made.directory.mkdir()
    with at_work(MODELS, valkey, made.namespace, made.environment()["BLOB_URL"]) as artist:
        try:
            made.start_gateway()
            for model in MODELS:
                made.wait_for_model(model)
            yield made, artist
        finally:
            made.stop()


@pytest.fixture
def pocket_stack(working: tuple[Stack, Artist]) -> Iterator[Stack]:
    yield working[0]
    working[0].close_clients()


@pytest.fixture
def artist(working: tuple[Stack, Artist]) -> Artist:
    return working[1]


def test_no_prompt_outside_the_vocabulary_is_charged_without_a_word(
    pocket_stack: Stack, artist: Artist
) -> None:
    caller = pocket_stack.caller()
    accepted = []

    for model, value, unknown, is_understood in PROMPTS:
        before, jobs = balance(caller), len(artist.jobs)
        answer = place(caller, model, **value)
        body = answer.json()
        if is_understood:
            (warning,) = body["warnings"]
            assert answer.status_code == 202
            assert warning["unknown"] == unknown
            assert len(warning["known"]) > 20
            accepted.append((body["id"], body["warnings"]))
            assert ended(caller, body["id"])["status"] == "succeeded"
            continue
        error = body["error"]
        assert (answer.status_code, error["code"]) == (400, "prompt_not_understood")
        assert (error["unknown"], len(error["examples"])) == (unknown, 3)
        assert (balance(caller), pocket_stack.held(caller), len(artist.jobs)) == (before, 0, jobs)
        assert all(path.parts[-2] != body.get("id") for path in stored(pocket_stack, caller))

    assert len(accepted) == sum(each[3] for each in PROMPTS)
    for request_id, warnings in accepted:
        found = caller.http.get(f"/v1/requests/{request_id}").json()
        assert found["cost"] != "0"
        assert found["warnings"] == warnings


def test_known_words_are_answered_without_a_warning(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    answer = place(caller, "pocket-image", prompt="A large red circle, on a dark background.")

    assert "tollgate-warning" not in answer.headers
    assert "warnings" not in answer.json()
    assert "warnings" not in ended(caller, answer.json()["id"])


def test_quote_refuses_and_warns_alike(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    def quote(prompt: str) -> Any:
        body = {"model": "pocket-image", "input": {"prompt": prompt}}
        return caller.http.post("/v1/quote", json=body)

    warned, refused = quote("a teal star").json(), quote("a photo of a cat")

    assert [(one["field"], one["unknown"]) for one in warned["warnings"]] == [
        ("input.prompt", ["teal"])
    ]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompt_not_understood")


def test_open_request_shows_its_warnings(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    placed = place(caller, "pocket-image", prompt="a red star !slow").json()
    found = caller.http.get(f"/v1/requests/{placed['id']}").json()
    caller.http.post(f"/v1/requests/{placed['id']}/cancel")

    assert found["status"] in ("queued", "running")
    assert found["warnings"] == placed["warnings"]


def test_openais_images_have_the_prompt_as_it_was_understood(pocket_stack: Stack) -> None:
    api = client(pocket_stack, pocket_stack.caller())

    raw = api.images.with_raw_response.generate(
        model="pocket-image", prompt="A teal star above a brown circle", n=2
    )
    drawn = raw.parse()

    assert raw.headers["tollgate-warning"] == 'prompt;unknown="teal brown"'
    assert drawn.data is not None
    assert [one.revised_prompt for one in drawn.data] == ["A star above a circle"] * 2
    (warning,) = drawn.warnings  # type: ignore[attr-defined]  # ours, beside OpenAI's
    assert (warning["field"], warning["unknown"]) == ("prompt", ["teal", "brown"])
    with pytest.raises(openai.BadRequestError, match="These work") as refused:
        api.images.generate(model="pocket-image", prompt="a photo of a cat")
    assert refused.value.param == "prompt"


def test_openais_streams_and_videos_have_warnings(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()
    api = client(pocket_stack, caller)
    video = {"model": "pocket-video", "prompt": "a teal star falls", "seconds": "2"}

    drawn = list(api.images.generate(model="pocket-image", prompt="a teal star", stream=True))
    filmed = caller.http.post("/v1/videos", json=video).json()
    later = caller.http.get(f"/v1/videos/{filmed['id']}").json()

    assert drawn[-1].warnings[0]["unknown"] == ["teal"]  # type: ignore[union-attr]  # ours
    assert filmed["warnings"][0]["unknown"] == ["teal"]
    assert later["warnings"] == filmed["warnings"]


def test_audio_has_a_header_in_the_words_of_its_dialect(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()
    speech = {"model": "pocket-speech", "voice": "ada", "input": "Hello 日本 😀"}
    spoken = {"model_id": "pocket-speech", "text": "Hello 😀"}
    played = {"model_id": "pocket-music", "prompt": "a calm tune with kazoo"}

    answers = [
        caller.http.post("/v1/audio/speech", json=speech),
        caller.http.post("/elevenlabs/v1/text-to-speech/ada", json=spoken),
        caller.http.post("/elevenlabs/v1/music", json=played),
    ]

    assert [answer.headers["tollgate-warning"] for answer in answers] == [
        'input;unknown="%E6%97%A5%E6%9C%AC %F0%9F%98%80"',
        'text;unknown="%F0%9F%98%80"',
        'prompt;unknown="kazoo"',
    ]


def test_refusal_has_the_shape_of_its_dialect(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()
    post = caller.http.post

    speech = post(
        "/v1/audio/speech", json={"model": "pocket-speech", "voice": "ada", "input": "😀"}
    )
    spoken = post(
        "/elevenlabs/v1/text-to-speech/ada", json={"model_id": "pocket-speech", "text": "😀"}
    )
    queued = post(
        QUEUE,
        json={"model": "pocket-image", "payload": {"prompt": "a cat"}},
    )

    assert {answer.status_code for answer in (speech, spoken, queued)} == {400}
    assert speech.json()["error"]["param"] == "input"
    detail = spoken.json()["detail"]
    assert (detail["status"], detail["param"]) == ("prompt_not_understood", "text")
    assert queued.json()["error"].startswith('pocket-image understands nothing of prompt ("cat")')


def test_gmis_queue_shows_warnings(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    placed = caller.http.post(
        QUEUE, json={"model": "pocket-image", "payload": {"prompt": "a teal star"}}
    ).json()
    ended(caller, placed["request_id"])
    found = caller.http.get(f"{QUEUE}/{placed['request_id']}").json()

    assert placed["warnings"][0]["unknown"] == ["teal"]
    assert found["warnings"] == placed["warnings"]


def test_batch_warns_in_its_results_and_refuses_its_lines(pocket_stack: Stack) -> None:
    api = batch_client(pocket_stack, pocket_stack.caller())
    warned = draw("warned", "a teal star", model="pocket-image", response_format="url")
    refused = draw("refused", "a photo of a cat", model="pocket-image")

    done = batch_ended(api, submit(api, GENERATIONS, warned).id)
    failed = batch_ended(api, submit(api, GENERATIONS, refused).id)

    row = results(api, done.output_file_id)["warned"]
    assert body_of(row)["warnings"][0]["unknown"] == ["teal"]
    assert body_of(row)["data"][0]["revised_prompt"] == "a star"
    (error,) = failed.errors.data
    assert (error.code, error.param) == ("prompt_not_understood", "body.prompt")


def test_lyrics_are_refused_before_anything_is_held(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    answer = place(caller, "pocket-music", prompt="a calm song", lyrics="la la")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.lyrics")


def test_catalog_shows_the_vocabulary_and_examples_that_work(pocket_stack: Stack) -> None:
    caller = pocket_stack.caller()

    entry = caller.http.get("/v1/catalog/pocket-image").json()

    assert {"red", "circle", "above"} <= set(entry["vocabulary"])
    assert len(entry["examples"]) >= 3
    assert "日" not in caller.http.get("/v1/catalog/pocket-speech").json()["vocabulary"]
