"""The catalog over HTTP: filters, picks, names in any case, and browsing without a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.accounts.visitors import TOTAL_FACTOR, Visitors
from gateway.errors import TooManyRequests
from tests.stack import Caller, Stack, chat

QUEUE = "/api/v1/ie/requestqueue/apikey"
IMAGE: dict[str, Any] = {"prompt": "x"}


@pytest.fixture
def caller(media_stack: Stack) -> Caller:
    return media_stack.caller()


@pytest.fixture
def visitor(media_stack: Stack) -> Iterator[httpx.Client]:
    """A client without a key. The catalog of this stack is public."""
    with httpx.Client(base_url=media_stack.url) as client:
        yield client


def test_filters_and_orders_are_applied_and_listed(caller: Caller) -> None:
    def names(query: str) -> list[str]:
        answer = caller.http.get(f"/v1/catalog?{query}")
        assert answer.is_success, answer.text
        return [one["name"] for one in answer.json()["data"]]

    assert names("task=TEXT-TO-SPEECH&sort=typical") == ["mimic", "reader"]
    assert names("typical_max=0.01") == ["pocket"]
    assert names("q=editing&available=true") == ["pocket"]
    assert set(names("sort=-speed")) == {"pocket", "film", "tune", "reader", "mimic"}
    whole = caller.http.get("/v1/catalog").json()
    assert whole["facets"]["task"]["image-blend"] == 1
    assert whole["data"][0]["typical_order"]["task"] == whole["data"][0]["task"]


def test_models_that_can_be_called_now_are_listed_alone(stack: Stack) -> None:
    caller = stack.caller()

    def names(query: str) -> set[str]:
        return {one["id"] for one in caller.http.get(f"/v1/models{query}").json()["data"]}

    assert "Veo3" in names("?available=false")
    assert "echo" in names("?available=true")
    assert names("") == names("?available=true") | names("?available=false")


@pytest.mark.parametrize(
    ("query", "param", "hint"),
    [
        ("?verdor=Bria", "verdor", "did you mean vendor?"),
        ("?task=text-to-vido", "task", "did you mean text-to-video?"),
        ("?sort=typicl", "sort", "did you mean typical?"),
        ("?role=student", "role", "nothing is accepted"),
        ("?typical_max=cheap", "typical_max", "an amount in USD"),
        ("/pick?q=image&budgit=1", "budgit", "did you mean budget?"),
        ("/pick?q=image&budget=a", "budget", "an amount in USD"),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    query: str, param: str, hint: str, caller: Caller
) -> None:
    answer = caller.http.get(f"/v1/catalog{query}")

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert hint in error["message"]


def test_pick_answers_within_the_models_of_the_key(media_stack: Stack, caller: Caller) -> None:
    asked = "/v1/catalog/pick?task=speak&budget=0.5"

    found = caller.http.get(asked).json()
    limited = media_stack.caller(models=["reader"]).http.get(asked).json()

    assert found["best"]["name"] == "mimic"
    assert found["best"]["typical_price"] == "0.1"
    assert found["today"]["name"] == "mimic"
    assert limited["best"]["name"] == "reader"


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", {"model": "Pocket", **IMAGE}),
        ("/v1/requests", {"model": "POCKET", "input": IMAGE}),
        ("/v1/quote", {"model": "pockeT", "input": IMAGE}),
        (f"{QUEUE}/requests", {"model": "Pocket", "payload": IMAGE}),
        ("/v1/videos", {"model": "FILM", **IMAGE}),
        ("/elevenlabs/v1/text-to-speech/ann", {"model_id": "Mimic", "text": "x"}),
    ],
)
def test_case_of_a_name_does_not_matter(path: str, body: dict[str, Any], caller: Caller) -> None:
    answer = caller.http.post(path, json=body)

    assert answer.is_success, answer.text
    assert "tollgate-model-alias" not in answer.headers
    if answer.headers["content-type"] == "application/json" and "model" in answer.json():
        assert answer.json()["model"] in ("pocket", "film")


def test_alias_in_another_case_is_reported_as_the_catalog_spells_it(caller: Caller) -> None:
    answer = caller.http.post("/v1/images/generations", json={"model": "DALL-E-3", **IMAGE})

    assert answer.headers["tollgate-model-alias"] == "dall-e-3 -> pocket"
    assert caller.http.get("/v1/models/Pocket").json()["id"] == "pocket"
    assert caller.http.get("/v1/catalog/Acme/Old").json()["name"] == "pocket"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", {"model": "pockt", **IMAGE}),
        ("/v1/requests", {"model": "pockt", "input": IMAGE}),
        ("/v1/chat/completions", chat("pockt", "x")),
        (f"{QUEUE}/requests", {"model": "pockt", "payload": IMAGE}),
        ("/elevenlabs/v1/music", {"model_id": "pockt", "prompt": "x"}),
        ("/v1/models/pockt", None),
        ("/v1/catalog/pockt", None),
    ],
)
def test_unknown_name_is_answered_with_the_nearest_visible_one(
    path: str, body: dict[str, Any] | None, media_stack: Stack, caller: Caller
) -> None:
    def ask(caller: Caller) -> str:
        answer = caller.http.request("GET" if body is None else "POST", path, json=body)
        assert answer.status_code == 404
        return answer.text

    assert "Did you mean pocket?" in ask(caller)
    assert "Did you mean" not in ask(media_stack.caller(models=["film"]))


# --- Without a key --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1/catalog",
        "/v1/catalog/pocket",
        "/v1/catalog/pick?q=image",
        "/v1/models",
        "/v1/models/film",
    ],
)
def test_public_catalog_is_read_without_a_key(path: str, visitor: httpx.Client) -> None:
    answer = visitor.get(path)

    assert answer.is_success, answer.text
    assert set(re.findall(r'"price_of":"(\w+)"', answer.text)) <= {"list"}
    assert "reason_detail" not in answer.text


def test_nothing_else_is_public(visitor: httpx.Client, stack: Stack) -> None:
    for path in ("/v1/models/pocket/stats", "/v1/balance", "/v1/requests", f"{QUEUE}/models"):
        assert visitor.get(path).status_code == 401, path
    wrong = visitor.get("/v1/catalog", headers={"Authorization": "Bearer tg_wrong"})
    assert wrong.status_code == 401
    assert httpx.get(f"{stack.url}/v1/catalog").status_code == 401, "not public by default"


def test_calls_without_a_key_are_limited_by_network_and_in_total() -> None:
    visitors = Visitors(2)

    for address in ("198.51.100.1", "198.51.100.1", "2001:db8::1", "2001:db8::2"):
        visitors.admit(address, 0)
    for address in ("198.51.100.1", "2001:db8::3"):
        with pytest.raises(TooManyRequests) as refused:
            visitors.admit(address, 59)
        assert refused.value.retry_after_s == 1
    for number in range(2 * TOTAL_FACTOR - 4):
        visitors.admit(f"192.0.2.{number}", 59)
    with pytest.raises(TooManyRequests):
        visitors.admit("203.0.113.1", 59)
    visitors.admit("198.51.100.1", 60)
