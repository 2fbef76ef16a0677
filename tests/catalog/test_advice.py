"""Findings about catalogs that can be loaded: contradicted contracts, and prices below cost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from gateway.catalog.advice import log_findings
from gateway.catalog.loader import check, load_catalog
from gateway.catalog.market.contract_checks import GMI_OPTIONS, SENT_AS
from workers.upstreams import gmi_wire

CATALOG = Path(__file__).parents[2] / "catalog.yaml"
GMI = {"dialect": "gmi", "url": "https://gmi.example.com", "credential": "GMI_API_KEY"}


def entry(name: str, **fields: Any) -> dict[str, Any]:
    shipped = yaml.safe_load(CATALOG.read_text())["models"]
    found: dict[str, Any] = next(one for one in shipped if one["name"] == name)
    options = {**found.get("options", {}), **fields.pop("options", {})}
    return {**found, "options": options, **fields}


def problems(directory: Path, *entries: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return level, path within its entry and message of each problem, without line numbers."""
    path = directory / "catalog.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": list(entries)}))
    found = check(path)
    assert all(one.line > 1 for one in found)
    return [(one.level, one.path.partition(".")[2], one.message) for one in found]


def errors(directory: Path, *entries: dict[str, Any]) -> list[tuple[str, str]]:
    return [(p, message) for level, p, message in problems(directory, *entries) if level == "error"]


def test_shipped_catalog_contradicts_no_contract() -> None:
    assert {problem.level for problem in check(CATALOG)} == {"warning"}


def test_known_options_are_those_of_the_workers() -> None:
    assert {*GMI_OPTIONS} == get_type_hints(gmi_wire.Options).keys()
    assert {k: v for k, v in gmi_wire._FIELDS.items() if k != v} == SENT_AS


WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # model, fields of the entry, place, part of the message
    "task": ("bria-fibo-edit", {"task": "image-blend"}, "task", "did you mean image-edit?"),
    "option": (
        "bria-fibo-edit",
        {"options": {"feilds": {}}},
        *("options.feilds", "did you mean fields?"),
    ),
    "name": (
        "bria-fibo-edit",
        {"options": {"fields": {"prompt": "prompt"}}},
        *("options.fields.prompt", "reads it as 'instruction'"),
    ),
    "parameter": (
        "Veo3",
        {"options": {"constants": {"aspectRato": "16:9"}}},
        *("options.constants.aspectRato", "did you mean aspectRatio?"),
    ),
    "constant": (
        "Veo3",
        {"options": {"constants": {"aspectRatio": "2:1"}}},
        *("options.constants.aspectRatio", "accepted: 16:9, 9:16"),
    ),
    "string": (
        "Sora-2-Pro",
        {"options": {"strings": []}},
        *("options.strings", "takes seconds as a string"),
    ),
    "picture": (
        "Kling-Image2Video-V2-Master",
        {"options": {"images": "image_url"}},
        *("options.images", "write `images: image`"),
    ),
    "limit": ("Sora-2-Pro", {"limits": {"seconds": 2}}, "limits.seconds", "it needs 4"),
    "default": (
        "pixverse-v5.6-t2v",
        {"default_parameters": {"seconds": 6.0}},
        *("default_parameters.seconds", "accepted: 5, 8, 10"),
    ),
    "resolution": (
        "Minimax-Hailuo-2.3-Fast",
        {"resolutions": ["720P"]},
        *("resolutions[0]", "accepted: 768P, 1080P"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_entry_that_contradicts_its_contract_is_an_error(name: str, tmp_path: Path) -> None:
    model, fields, place, words = WRONG[name]

    found = errors(tmp_path, entry(model, **fields))

    assert [one[0] for one in found] == [place], found
    assert words in found[0][1]
    assert load_catalog(tmp_path / "catalog.yaml").models


def test_contract_that_fits_no_entry_is_suggested(tmp_path: Path) -> None:
    upstream = {**GMI, "model": "seedream-5.0-light"}
    sold = {**entry("seedream-5.0-lite", upstream=upstream), "name": "ours"}

    ((level, place, message),) = problems(tmp_path, sold)

    assert (level, place) == ("warning", "upstream.model")
    assert "did you mean seedream-5.0-lite?" in message


COSTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # fields of minimax-tts-speech-2.6-turbo at $0.06 a request, parts of the warning
    "unbounded": (
        {"cost": [{"unit": "character", "amount": "0.06", "per": 1000}]},
        ["set limits.characters", "the price covers 1,000 characters"],
    ),
    "long": (
        {
            "cost": [{"unit": "character", "amount": "0.06", "per": 1000}],
            "limits": {"characters": 5000},
        },
        ["5,000 characters cost $0.3 upstream, and sell for $0.06"],
    ),
    "bounded": (
        {
            "cost": [{"unit": "character", "amount": "0.06", "per": 1000}],
            "limits": {"characters": 1000},
        },
        [],
    ),
    "by the character": (
        {
            "cost": [{"unit": "character", "amount": "0.06", "per": 1000}],
            "price": [{"unit": "character", "amount": "0.09", "per": 1000}],
        },
        [],
    ),
    "flat": ({"cost": [{"unit": "request", "amount": "0.05"}]}, []),
    "above the price": (
        {"cost": [{"unit": "request", "amount": "0.07"}]},
        ["a request costs $0.07 upstream, and sells for $0.06"],
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_request_that_can_cost_more_than_it_sells_for_is_a_warning(
    name: str, tmp_path: Path
) -> None:
    fields, words = COSTS[name]

    found = problems(tmp_path, entry("minimax-tts-speech-2.6-turbo", **fields))

    assert [(level, place) for level, place, _ in found] == [("warning", "cost")] * bool(words)
    assert all(part in found[0][2] for part in words), found


def test_batch_price_below_cost_is_a_warning(tmp_path: Path) -> None:
    sold = entry(
        "minimax-tts-speech-2.6-turbo", batch=True, cost=[{"unit": "request", "amount": "0.05"}]
    )

    ((level, place, message),) = problems(tmp_path, sold)

    assert (level, place) == ("warning", "batch_discount")
    assert message.startswith("in a batch, a request costs $0.05 upstream, and sells for $0.03; ")
    assert "lower batch_discount" in message
    assert problems(tmp_path, {**sold, "batch_discount": "0.1"}) == []


def test_cost_by_quality_is_compared_at_the_dearest(tmp_path: Path) -> None:
    by_quality = {"unit": "image", "amount": "0.09", "when": {"quality": "high"}}
    cost = [{"unit": "image", "amount": "0.01"}, by_quality]
    sold = entry("seedream-5.0-lite", cost=cost, qualities={"low": {}, "high": {}})

    (found,) = problems(tmp_path, sold)

    assert found[2].startswith("1 image (quality high) costs $0.09 upstream, and sells for $0.035")


def test_only_upstreams_have_a_cost(tmp_path: Path) -> None:
    cost = [{"unit": "request", "amount": "0.01"}]
    echo = {"name": "echo", "task": "text-to-image", "engine": "echo", "price": cost, "cost": cost}
    unmeasured = entry("Veo3", cost=[{"unit": "gpu_second", "amount": "0.01"}])

    assert "gpu_hours" in errors(tmp_path, echo)[0][1]
    assert errors(tmp_path, unmeasured)[0][0] == "cost[0].unit"


def test_start_of_a_gateway_names_the_models_that_lose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log_findings(load_catalog(CATALOG).models)

    (record,) = caplog.records
    assert "14 models can cost more than they sell for" in record.message
    assert "Sora-2-Pro" in record.message


def test_examples_outside_of_the_vocabulary_are_named(tmp_path: Path) -> None:
    own = {
        "name": "own",
        "task": "text-to-image",
        "engine": "echo",
        "vocabulary": {"words": ["red", "circle"]},
        "price": [{"unit": "image", "amount": "0.01"}],
        "examples": [{"prompt": "a red circle"}, {"prompt": "a teal circle"}],
    }
    chat = entry("pocket-chat", vocabulary={"words": ["hello"]})

    assert problems(tmp_path, own, chat) == [
        ("warning", "examples[1].prompt", "not in the vocabulary: 'teal'"),
        (
            "warning",
            "vocabulary",
            "has no effect: only prompts of images, videos and audio are read by it",
        ),
    ]
