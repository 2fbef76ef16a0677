"""Control and reference pictures of a request against those that a catalog entry lists."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.catalog.listing import entry_view
from gateway.catalog.schema import CatalogEntry
from gateway.console.playground.fields import fields_of
from gateway.errors import InvalidRequest
from gateway.files.sources import RemoteSource
from gateway.pricing import quote
from gateway.tasks.prepared import Prepared
from gateway.tasks.visual import ImageTask, prepare_image

EDGES: dict[str, Any] = {"checkpoint": "edges", "strength": 0.5, "strength_max": 1.5}
OPTIONS: dict[str, Any] = {
    "controls": {"edges": EDGES, "depth": {"checkpoint": "depth"}},
    "reference": {"checkpoint": "adapter.safetensors", "strength": 0.6},
}
ENTRY: dict[str, Any] = {
    "name": "painter",
    "task": "text-to-image",
    "also": ["image-to-image"],
    "engine": "diffusion",
    "checkpoint": "painter",
    "options": OPTIONS,
    "price": [
        {"unit": "image", "amount": "0.01"},
        {"unit": "image", "amount": "0.03", "when": {"control": "edges"}},
        {"unit": "image", "amount": "0.02", "when": {"reference": "image"}},
        {"unit": "image", "amount": "0.04", "when": {"control": "edges", "reference": "image"}},
    ],
}
URL = "https://pictures.example/a.png"


def _entry(**options: Any) -> CatalogEntry:
    price = ENTRY["price"][:1] if options else ENTRY["price"]
    return CatalogEntry.model_validate({**ENTRY, "options": options or OPTIONS, "price": price})


def _prepare(entry: CatalogEntry, **asked: Any) -> Prepared:
    task = "image-to-image" if asked.get("image") else "text-to-image"
    value = ImageTask.model_validate({"prompt": "x", **asked})
    return prepare_image(entry, task, value, prefix="input.")


def test_guides_are_passed_on_and_attached_after_sources_and_mask() -> None:
    prepared = _prepare(
        _entry(),
        image=f"{URL}?1",
        mask=f"{URL}?2",
        control="edges",
        control_image=f"{URL}?3",
        reference_image=f"{URL}?4",
        reference_strength=0.9,
    )

    names = ("control", "control_strength", "reference", "reference_strength")
    assert [prepared.input[name] for name in names] == ["edges", 0.5, True, 0.9]
    sources = [source.given for source in prepared.sources]
    assert sources == [RemoteSource(f"{URL}?{place}") for place in (1, 2, 3, 4)]


def test_the_only_control_network_needs_no_name() -> None:
    prepared = _prepare(_entry(controls={"edges": EDGES}), control_image=URL, control_strength=1.5)

    assert prepared.input["control"] == "edges"
    assert prepared.input["control_strength"] == 1.5


@pytest.mark.parametrize(
    ("asked", "cents"),
    [
        ({}, 1),
        ({"control": "depth", "control_image": URL}, 1),
        ({"control": "edges", "control_image": URL}, 3),
        ({"reference_image": URL}, 2),
        ({"control": "edges", "control_image": URL, "reference_image": URL}, 4),
    ],
)
def test_price_can_depend_on_guides(asked: dict[str, str], cents: int) -> None:
    entry = _entry()

    limits = _prepare(entry, **asked).limits

    assert quote(entry.selling_price, limits).total_nanos == cents * 10_000_000


@pytest.mark.parametrize(
    ("options", "asked", "code", "param", "words"),
    [
        (
            OPTIONS,
            {"control": "pose", "control_image": URL},
            "invalid_value",
            "input.control",
            "painter has no control network pose; it has: edges, depth",
        ),
        (
            OPTIONS,
            {"control_image": URL},
            "missing_required_parameter",
            "input.control",
            "several control networks; send input.control, one of: edges, depth",
        ),
        (
            OPTIONS,
            {"control": "edges"},
            "missing_required_parameter",
            "input.control_image",
            "input.control needs a picture; send input.control_image",
        ),
        (
            OPTIONS,
            {"control": "edges", "control_image": URL, "control_strength": 2.0},
            "invalid_value",
            "input.control_strength",
            "painter takes at most 1.5",
        ),
        (
            OPTIONS,
            {"reference_image": URL, "reference_strength": 1.1},
            "invalid_value",
            "input.reference_strength",
            "painter takes at most 1",
        ),
        (
            OPTIONS,
            {"reference_strength": 1.0},
            "missing_required_parameter",
            "input.reference_image",
            "send input.reference_image",
        ),
        (
            {"steps": 4},
            {"control_image": URL},
            "unsupported_parameter",
            "input.control_image",
            "painter has no control networks",
        ),
        (
            {"steps": 4},
            {"reference_image": URL},
            "unsupported_parameter",
            "input.reference_image",
            "painter reads no reference images",
        ),
    ],
)
def test_guide_that_is_not_listed_or_too_strong_is_refused(
    options: dict[str, Any], asked: dict[str, Any], code: str, param: str, words: str
) -> None:
    entry = _entry() if options is OPTIONS else _entry(**options)

    with pytest.raises(InvalidRequest, match=words) as raised:
        _prepare(entry, **asked)

    assert (raised.value.code, raised.value.param) == (code, param)


def test_listing_names_guides_and_their_strengths_but_no_files() -> None:
    view = entry_view(_entry(), [], find={}.get)

    assert view["controls"] == {
        "edges": {"strength": 0.5, "strength_max": 1.5},
        "depth": {"strength": 1.0, "strength_max": 1.0},
    }
    assert view["reference"] == {"strength": 0.6, "strength_max": 1.0}
    assert "safetensors" not in str(view)


def test_forms_have_fields_for_the_guides_of_a_model() -> None:
    names = {"control", "control_image", "control_strength", "reference_image"}

    guided = {field.name for field in fields_of(_entry(), "text-to-image")}
    plain = {field.name for field in fields_of(_entry(steps=4), "text-to-image")}

    assert names <= guided
    assert not names & plain


def test_price_for_a_guide_that_the_model_lacks_is_refused() -> None:
    price = [*ENTRY["price"][:1], {"unit": "image", "amount": "1", "when": {"control": "pose"}}]

    with pytest.raises(ValidationError, match="'pose' is not one of its controls: edges, depth"):
        CatalogEntry.model_validate({**ENTRY, "price": price})
    with pytest.raises(ValidationError, match="not one of its controls: it has none"):
        CatalogEntry.model_validate({**ENTRY, "options": {}, "price": price})
