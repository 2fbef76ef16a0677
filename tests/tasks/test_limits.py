"""Inputs are bounded before they are priced, even if the catalog sets no limits."""

from __future__ import annotations

import pytest

from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.tasks.registry import parse, prepare


@pytest.mark.parametrize("seconds", [86_400.001, 1e18, 1e308])
def test_more_seconds_than_a_day_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse("text-to-video", {"prompt": "rain", "seconds": seconds})

    assert refused.value.param == "input.seconds"
    assert "less than or equal to 86400" in str(refused.value)


def test_duration_is_bounded_even_if_the_price_does_not_need_it() -> None:
    film = CatalogEntry.model_validate(
        {
            "name": "film",
            "task": "text-to-video",
            "engine": "echo",
            "price": [{"unit": "request", "amount": "1"}],
        }
    )

    prepared = prepare(film, parse("text-to-video", {"prompt": "rain", "seconds": 86_400}))

    assert prepared.limits.video_ms == 86_400_000


def test_scale_limit_defaults_to_the_engines_for_upscalers_and_1_for_generators() -> None:
    price = [{"unit": "request", "amount": "1"}]
    larger = {"name": "larger", "task": "image-upscale", "engine": "echo", "price": price}
    painter = {**larger, "task": "text-to-image", "also": ["image-to-image"]}
    value = parse("image-upscale", {"image": "https://example.com/a.png", "scale": 4})

    assert prepare(CatalogEntry.model_validate(larger), value).input["scale"] == 4
    with pytest.raises(InvalidRequest, match="upscales 1 times"):
        prepare(CatalogEntry.model_validate(painter), value)


@pytest.mark.parametrize(
    ("size", "hint"),
    [
        ("256x128", "Send size 128x64 and scale 2 to get 256x128."),
        ("1024x1024", "A scale of at most 4 enlarges them."),
        ("256x1024", "A scale of at most 4 enlarges them."),
    ],
)
def test_size_that_a_scale_can_give_is_refused_with_that_scale(size: str, hint: str) -> None:
    painter = CatalogEntry.model_validate(
        {
            "name": "painter",
            "task": "text-to-image",
            "engine": "echo",
            "sizes": ["64x64", "128x64"],
            "limits": {"scale": 4, "images": 1},
            "price": [{"unit": "image", "amount": "1"}],
        }
    )

    with pytest.raises(InvalidRequest, match=f"supports 64x64, 128x64. {hint}$"):
        prepare(painter, parse("text-to-image", {"prompt": "rain", "size": size}))
