"""LoRA adapters of a request against those that a catalog entry lists."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.catalog.listing import entry_view
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.tasks.visual import ImageTask, VideoTask, prepare_image, prepare_video

ENTRY: dict[str, Any] = {
    "name": "painter",
    "task": "text-to-image",
    "engine": "diffusion",
    "checkpoint": "painter",
    "options": {
        "adapters": {
            "oils": {"checkpoint": "oils", "scale": 0.8, "scale_max": 1.5},
            "ink": {"checkpoint": "ink.safetensors"},
        }
    },
    "price": [{"unit": "image", "amount": "0.01"}],
}
FILM = {
    **ENTRY,
    "task": "text-to-video",
    "limits": {"seconds": 5},
    "price": [{"unit": "video_second", "amount": "0.1"}],
}


def test_adapters_are_passed_on_with_their_scales() -> None:
    entry = CatalogEntry.model_validate(ENTRY)
    value = ImageTask(prompt="x", adapters={"oils": None, "ink": 0.5})

    prepared = prepare_image(entry, "text-to-image", value, prefix="input.")

    assert prepared.input["adapters"] == {"oils": 0.8, "ink": 0.5}


def test_adapters_of_a_video_are_passed_on() -> None:
    entry = CatalogEntry.model_validate(FILM)
    value = VideoTask(prompt="x", adapters={"oils": 1.5})

    prepared = prepare_video(entry, "text-to-video", value, prefix="input.")

    assert prepared.input["adapters"] == {"oils": 1.5}


@pytest.mark.parametrize(
    ("adapters", "param", "words"),
    [
        ({"water": 1.0}, "input.adapters.water", "painter has no adapter water; it has: oils, ink"),
        ({"oils": 1.6}, "input.adapters.oils", "painter takes at most 1.5"),
        ({"ink": 1.1}, "input.adapters.ink", "painter takes at most 1"),
    ],
)
def test_adapter_that_is_not_listed_or_too_strong_is_refused(
    adapters: dict[str, float | None], param: str, words: str
) -> None:
    entry = CatalogEntry.model_validate(ENTRY)

    with pytest.raises(InvalidRequest, match=words) as raised:
        prepare_image(
            entry, "text-to-image", ImageTask(prompt="x", adapters=adapters), prefix="input."
        )

    assert raised.value.param == param


def test_price_does_not_depend_on_adapters() -> None:
    entry = CatalogEntry.model_validate(ENTRY)
    plain, adapted = (
        prepare_image(
            entry, "text-to-image", ImageTask(prompt="x", adapters=chosen), prefix="input."
        )
        for chosen in (None, {"oils": 1.0})
    )

    assert plain.limits == adapted.limits


def test_listing_names_adapters_and_their_scales_but_no_files() -> None:
    view = entry_view(CatalogEntry.model_validate(ENTRY), [], find={}.get)

    assert view["adapters"] == {
        "oils": {"scale": 0.8, "scale_max": 1.5},
        "ink": {"scale": 1.0, "scale_max": 1.0},
    }
    assert "safetensors" not in str(view)
