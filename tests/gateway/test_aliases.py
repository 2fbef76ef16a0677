"""A model can be named by an alias, and every answer says so."""

from __future__ import annotations

import pytest

from tests.gateway.test_files import client
from tests.stack import Stack

HEADER = "tollgate-model-alias"


def test_answer_under_an_alias_names_the_resolved_model(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    raw = api.images.with_raw_response.generate(model="dall-e-3", prompt="x")

    assert raw.headers[HEADER] == "dall-e-3 -> pocket"
    assert raw.parse().model == "pocket"  # type: ignore[attr-defined]  # ours
    request_id = raw.headers["x-request-id"]
    for path in ("", "/receipt"):
        found = caller.http.get(f"/v1/requests/{request_id}{path}").json()
        assert (found["model"], found["ordered_as"]) == ("pocket", "dall-e-3")
    direct = api.images.with_raw_response.generate(model="pocket", prompt="x")
    assert HEADER not in direct.headers


def test_streams_videos_and_errors_also_name_the_resolved_model(media_stack: Stack) -> None:
    caller = media_stack.caller()
    poor = media_stack.caller(credit="0")
    image = {"model": "dall-e-3", "prompt": "x"}

    answers = [
        caller.http.post("/v1/images/generations", json={**image, "stream": True}),
        caller.http.post("/v1/videos", json={"model": "sora-2", "prompt": "x"}),
        caller.http.post("/v1/requests", json={"model": "acme/old", "input": {"prompt": "x"}}),
        poor.http.post("/v1/images/generations", json=image),
    ]

    assert [answer.headers[HEADER] for answer in answers] == [
        "dall-e-3 -> pocket",
        "sora-2 -> film",
        "acme/old -> pocket",
        "dall-e-3 -> pocket",
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 202, 402]
    assert answers[1].json()["model"] == "film"


def test_quote_under_an_alias_is_the_models_quote(media_stack: Stack) -> None:
    caller = media_stack.caller()

    quoted = caller.http.post("/v1/quote", json={"model": "dall-e-3", "input": {"prompt": "x"}})

    assert quoted.json()["model"] == "pocket"
    assert quoted.json()["ordered_as"] == "dall-e-3"


@pytest.mark.parametrize("alias", ["dall-e-3", "acme/old"])
def test_alias_is_listed_with_its_model(alias: str, media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    raw = api.models.with_raw_response.retrieve(alias)

    assert raw.headers[HEADER] == f"{alias} -> pocket"
    model = raw.parse().model_dump()
    assert (model["id"], model["alias_of"]) == (alias, "pocket")
    names = [one.id for one in api.models.list()]
    assert names == ["pocket", "film", "tune", "reader", "mimic"]
    assert caller.http.get(f"/v1/catalog/{alias}").json()["name"] == "pocket"
    assert caller.http.get("/v1/catalog/pocket").json()["aliases"] == ["dall-e-3", "acme/old"]
