"""What upstreams publish of their models, compared with the catalog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.catalog.loader import load_catalog
from gateway.catalog.market.contract import Contract, contracts
from gateway.catalog.market.published import read_price
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.upstream_check import UpstreamFinding, check_upstreams, questions
from gateway.notices.upstreams import upstreams_changed
from gateway.pricing import Component, Price
from tests.workers.fake_gmi import KEY, fake_gmi

CATALOG = Path(__file__).parents[2] / "catalog.yaml"
MODEL = "minimax-tts-speech-2.6-turbo"


def sold(directory: Path, url: str, **fields: Any) -> tuple[CatalogEntry, ...]:
    shipped = yaml.safe_load(CATALOG.read_text())["models"]
    entry = next(one for one in shipped if one["name"] == MODEL)
    entry |= {"upstream": {**entry["upstream"], "url": url}, **fields}
    path = directory / "catalog.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": [entry]}))
    return load_catalog(path).models


def parameters(contract: Contract) -> list[dict[str, Any]]:
    return [
        {
            "name": one.sent_as,
            "type": "string",
            "required": one.required,
            "options": [{"value": one.values.get(str(x), str(x))} for x in one.options],
            "min_value": one.min,
            "max_value": one.max,
        }
        for one in contract.parameters
    ]


def changed(parameter: str, /, **fields: Any) -> Callable[[dict[str, Any]], object]:
    def change(model: dict[str, Any]) -> None:
        next(one for one in model["parameters"] if one["name"] == parameter).update(fields)

    return change


FOUND: dict[str, tuple[Callable[[dict[str, Any]], object], list[tuple[str, str]]]] = {
    "same": (lambda model: None, []),
    "dead": (lambda model: model.update(status="retired"), [("error", "status is 'retired'")]),
    "renamed": (
        changed("voice_id", name="voice_ids"),
        [
            ("warning", "no parameter 'voice_id'; did it become 'voice_ids'?"),
            ("warning", "has a parameter 'voice_ids'"),
        ],
    ),
    "required": (
        lambda model: model["parameters"].append({"name": "region", "required": True}),
        [("error", "requires 'region'")],
    ),
    "option": (
        changed("format", options=["mp3", "wav"]),
        [("error", "'format' no longer accepts flac"), ("warning", "also accepts wav")],
    ),
    "bound": (changed("pitch", max_value=6), [("warning", "'pitch' has the maximum 6, not 12")]),
    "price": (
        lambda model: model.update(price_info={"price": 60_000, "unit": "1k characters"}),
        [
            ("error", "published at $0.06 per 1,000 character, so a request can cost $0.6, and"),
            ("warning", "but `cost` is $0.05 per request"),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
async def test_differences_from_what_is_published_are_found(name: str, tmp_path: Path) -> None:
    change, expected = FOUND[name]
    async with fake_gmi() as service:
        cost = [{"unit": "request", "amount": "0.05"}]
        entries = sold(tmp_path, service.url, cost=cost, limits={"characters": 10_000})
        service.models[MODEL] = ("request", "0.05")
        service.published[MODEL] = {"parameters": parameters(contracts()[MODEL])}
        change(service.published[MODEL])

        found, asked = await check_upstreams(entries, {"GMI_API_KEY": KEY})

    assert asked == 1
    assert [one.level for one in found] == [level for level, _ in expected], found
    assert all(words in one.message for one, (_, words) in zip(found, expected, strict=True)), found
    assert service.calls == [f"GET /models/{MODEL}"]


async def test_model_that_is_gone_and_credential_that_is_wrong(tmp_path: Path) -> None:
    async with fake_gmi() as service:
        entries = sold(tmp_path, service.url)
        (gone,), _ = await check_upstreams(entries, {"GMI_API_KEY": KEY})
        (denied,), _ = await check_upstreams(entries, {"GMI_API_KEY": "wrong"})
        nothing = await check_upstreams(entries, {})

    assert (gone.level, "does not have this model" in gone.message) == ("error", True)
    assert (denied.level, "status 401" in denied.message) == ("warning", True)
    assert nothing == ([], 0)
    (question,) = questions(entries)
    assert question.url.endswith(f"/api/v1/ie/requestqueue/apikey/models/{MODEL}")


def test_same_findings_are_told_once() -> None:
    one, other = (UpstreamFinding(name, "error", "it is gone") for name in "ab")

    assert upstreams_changed([one, other]).key == upstreams_changed([other, one]).key
    assert upstreams_changed([one]).key != upstreams_changed([other]).key
    assert upstreams_changed([one]).title == "The catalog differs from the upstreams of 1 model"


REQUEST = Component("request", 50_000_000)
SECOND = Component("video_second", 152_000_000)
THOUSAND = Component("character", 60_000_000, 1000)


@pytest.mark.parametrize(
    ("info", "component"),
    [
        ({"price": 35_000, "unit": "image"}, Component("image", 35_000_000)),
        ({"price": 152_000, "unit": "second"}, SECOND),
        (
            {"price": "0.05", "pricing_type": "request", "unit": "USD"},
            Component("request", 5 * 10**7),
        ),
        ({"price": 60_000, "unit": "per 1,000 characters"}, THOUSAND),
        ({"price": 60_000, "unit": "parsec"}, None),
        ({"price": None}, None),
        (None, None),
    ],
)
def test_published_prices_are_read_with_their_unit(
    info: dict[str, Any] | None, component: Component | None
) -> None:
    entry = next(one for one in load_catalog(CATALOG).models if one.name == "Veo3")

    price = read_price(entry, {"price_info": info})

    assert price == (None if component is None else Price((component,)))
