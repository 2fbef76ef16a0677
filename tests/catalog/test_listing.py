"""The catalog as JSON, and the availability of models."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Model

from gateway.catalog.availability import availability
from gateway.catalog.listing import (
    decimal,
    entry_view,
    model_view,
    providers_view,
)
from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.pricing import parse_usd
from workers.contract.announcements import Announcement

CATALOG = load_catalog(Path(__file__).parents[2] / "catalog.yaml").models
ENTRIES = {entry.name: entry for entry in CATALOG}
LOCAL = Announcement("w1", models=("pocket-chat",), unavailable={"Veo3": "GMI_API_KEY is not set"})


def test_openais_client_reads_every_model() -> None:
    for entry in CATALOG:
        view = json.loads(json.dumps(model_view(entry, [LOCAL], 1_700_000_000)))

        model = Model.model_validate(view)

        assert model.id == entry.name
        assert model.object == "model"
        assert model.created == 1_700_000_000
        assert model.owned_by == entry.vendor


def test_prices_per_token_are_listed_as_openrouter_lists_them() -> None:
    view = model_view(ENTRIES["pocket-chat"], [LOCAL], 0)

    assert view["pricing"] == {
        "prompt": "0.00000002",
        "completion": "0.00000008",
        "request": "0",
        "input_cache_read": "0.000000005",
    }
    assert view["context_length"] == 1024
    assert view["top_provider"]["max_completion_tokens"] == 512
    assert view["architecture"]["modality"] == "text->text"
    assert "temperature" in view["supported_parameters"]
    assert view["available"] is True
    assert view["reason"] is None


def test_prices_per_request_are_listed_without_exponent() -> None:
    view = model_view(ENTRIES["bria-fibo-relight"], [LOCAL], 0)

    assert view["pricing"] == {"prompt": "0", "completion": "0", "request": "0.000001"}
    assert view["price"] == [{"unit": "request", "amount": "0.000001", "per": 1, "when": None}]
    assert view["supported_parameters"] == []


def test_modalities_are_those_of_all_tasks_of_a_model() -> None:
    architecture = model_view(ENTRIES["seedream-5.0-lite"], [], 0)["architecture"]

    assert architecture["input_modalities"] == ["text", "image"]
    assert architecture["output_modalities"] == ["image"]


REQUIRED_OF_ENDPOINTS = {
    "context_length",
    "latency_last_30m",
    "max_completion_tokens",
    "max_prompt_tokens",
    "model_id",
    "model_name",
    "name",
    "pricing",
    "provider_name",
    "quantization",
    "supported_parameters",
    "supports_implicit_caching",
    "supports_tool_choice",
    "tag",
    "throughput_last_30m",
    "uptime_last_1d",
    "uptime_last_30m",
    "uptime_last_5m",
}
"""Fields without which @openrouter/sdk 1.3.19 refuses an endpoint of a model."""


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_endpoints_of_every_model_have_what_openrouters_client_requires(name: str) -> None:
    entry = ENTRIES[name]

    view = providers_view(entry, model_view(entry, [LOCAL], 0))

    (endpoint,) = view["endpoints"]
    assert endpoint.keys() >= REQUIRED_OF_ENDPOINTS
    assert isinstance(endpoint["context_length"], int)
    assert (endpoint["model_id"], endpoint["model_name"]) == (name, entry.name)
    chats = "text-generation" in (entry.task, *entry.also)
    assert endpoint["supports_tool_choice"] == dict.fromkeys(
        ("auto", "function", "none", "required"), chats
    )
    assert endpoint["supports_voice_cloning"] is ("voice-clone" in (entry.task, *entry.also))


def test_conditional_price_is_listed_at_its_highest_for_openrouter_and_in_full_natively() -> None:
    entry = CatalogEntry.model_validate(
        {
            "name": "painter",
            "task": "text-to-image",
            "engine": "echo",
            "price": [
                {"unit": "image", "amount": "0.02"},
                {"unit": "image", "amount": "0.08", "when": {"quality": "high"}},
                {"unit": "image", "amount": "0.01", "when": {"quality": "low"}},
            ],
        }
    )

    assert model_view(entry, [], 0)["pricing"]["image"] == "0.08"
    assert entry_view(entry, [], find=ENTRIES.get)["from_price"] == "0.01"
    assert entry_view(entry, [], find=ENTRIES.get)["price"][1] == {
        "unit": "image",
        "amount": "0.08",
        "per": 1,
        "when": {"quality": "high"},
    }


def test_entry_has_all_fields_of_a_model() -> None:
    view = json.loads(
        json.dumps(entry_view(ENTRIES["seedream-4-0-250828"], [LOCAL], find=ENTRIES.get))
    )

    assert view["name"] == "seedream-4-0-250828"
    assert view["task"] == "text-to-image"
    assert view["also"] == ["image-edit"]
    assert view["available"] is False
    assert view["price"] == [{"unit": "request", "amount": "0.05", "per": 1, "when": None}]
    assert view["from_price"] == "0.05"
    assert view["family"] == "Seedream"
    assert view["good_for"] == ["illustration", "editing"]
    assert view["route"] == "upstream"


def test_no_view_reveals_upstream_urls_or_credentials() -> None:
    for entry in CATALOG:
        text = json.dumps(
            [entry_view(entry, [LOCAL], find=ENTRIES.get), model_view(entry, [LOCAL], 0)]
        )

        assert "gmicloud" not in text
        assert "workers/pocket" not in text


@given(
    nanos=st.integers(1, 10**18 - 1),
    per=st.integers(1, 10**9),
    minimum=st.none() | st.integers(1, 10**18 - 1),
)
def test_listed_amounts_are_exact_and_plain(nanos: int, per: int, minimum: int | None) -> None:
    def usd(amount: int) -> str:
        return f"{amount // 10**9}.{amount % 10**9:09d}"

    entry = CatalogEntry.model_validate(
        {
            "name": "m",
            "task": "text-to-image",
            "engine": "echo",
            "price": [{"unit": "image", "amount": usd(nanos), "per": per}],
            "minimum": usd(minimum) if minimum else None,
        }
    )
    view = entry_view(entry, [], find=ENTRIES.get)

    assert parse_usd(view["price"][0]["amount"]) == nanos
    assert view["minimum"] is None or parse_usd(view["minimum"]) == minimum
    assert set(view["from_price"]) <= set("0123456789.")
    assert abs(Fraction(view["from_price"]) - Fraction(nanos, per * 10**9)) <= Fraction(1, 10**18)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(1, 3), "0.333333333333333333"),
        (Fraction(1, 10**18), "0.000000000000000001"),
        (Fraction(25), "25"),
        (Fraction(10**9 * 100 + 1, 10**9), "100.000000001"),
    ],
)
def test_decimals_have_no_exponent_and_no_idle_zeros(value: Fraction, text: str) -> None:
    assert decimal(value) == text


def test_a_model_is_available_once_a_worker_serves_it() -> None:
    entry = ENTRIES["Veo3"]

    assert availability(entry, [LOCAL, Announcement("w2", models=("Veo3",))]) is None


def test_a_draining_worker_serves_nothing() -> None:
    missing = availability(
        ENTRIES["pocket-chat"], [Announcement("w", models=("pocket-chat",), draining=True)]
    )

    assert missing is not None
    assert missing.code == "no_worker"
    assert missing.reason == "no worker serves it now"


def test_upstream_without_its_credential_is_reported_as_not_configured() -> None:
    told = availability(ENTRIES["Veo3"], [LOCAL])
    untold = availability(ENTRIES["Veo3"], [])

    assert told is not None
    assert told.code == "upstream_not_configured"
    assert told.detail == "GMI_API_KEY is not set"
    assert untold is not None
    assert untold.code == "upstream_not_configured"
    assert "GMI_API_KEY" in (untold.detail or "")
    assert told.reason == untold.reason == "it is not set up on this gateway"


def test_unreachable_upstream_is_configured_and_can_be_retried() -> None:
    worker = Announcement("w1", unavailable={"Veo3": "its upstream does not answer"})

    missing = availability(ENTRIES["Veo3"], [worker])

    assert missing is not None
    assert missing.code == "upstream_unavailable"
    assert missing.reason == "its upstream does not answer"


def test_only_operators_see_the_cause_of_unavailability() -> None:
    plain, full = (
        entry_view(ENTRIES["Veo3"], [LOCAL], find=ENTRIES.get, for_operator=flag)
        for flag in (False, True)
    )

    assert "GMI_API_KEY" not in str(plain)
    assert full["reason_detail"] == "GMI_API_KEY is not set"


def test_local_model_reports_its_workers_reason() -> None:
    worker = Announcement("w", unavailable={"pocket-chat": "the engine llm needs torch"})

    missing = availability(ENTRIES["pocket-chat"], [worker])

    assert missing is not None
    assert missing.code == "no_worker"
    assert missing.reason == "the engine llm needs torch"
