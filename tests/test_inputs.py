"""What a client asks for is bounded before it is priced, whatever the catalog leaves open."""

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


def test_seconds_are_bounded_though_a_price_per_request_needs_no_limit_on_them() -> None:
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


def test_an_upscaler_says_itself_how_far_it_goes_and_a_painter_goes_no_further_than_told() -> None:
    price = [{"unit": "request", "amount": "1"}]
    larger = {"name": "larger", "task": "image-upscale", "engine": "echo", "price": price}
    painter = {**larger, "task": "text-to-image", "also": ["image-to-image"]}
    value = parse("image-upscale", {"image": "https://example.com/a.png", "scale": 4})

    assert prepare(CatalogEntry.model_validate(larger), value).input["scale"] == 4
    with pytest.raises(InvalidRequest, match="upscales 1 times"):
        prepare(CatalogEntry.model_validate(painter), value)
