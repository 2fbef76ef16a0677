"""Texts of which a model understands nothing are refused, with examples; others are warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.errors import InvalidRequest
from gateway.tasks.registry import parse
from gateway.tasks.understanding import check_understood
from gateway.tasks.workflow_submission import WorkflowSubmission
from gateway.workflows.plan import PlannedRun, StepModels, plan

CATALOG = load_catalog(Path(__file__).parents[2] / "catalog.yaml").models
ENTRIES = {entry.name: entry for entry in CATALOG}


def check(model: str, **value: Any) -> Any:
    return check_understood(ENTRIES[model], vars(parse(ENTRIES[model].task, value)), prefix="input")


def refusal(model: str, **value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        check(model, **value)
    assert refused.value.code == "prompt_not_understood"
    return refused.value


def test_refusal_has_three_examples_that_work() -> None:
    error = refusal("pocket-image", prompt="a photo of a cat")

    assert error.message == (
        'pocket-image understands nothing of input.prompt ("photo", "cat"). These work: '
        '"a red circle above a blue square"; "a large green star, pixel art"; '
        '"a small yellow heart on a dark background". '
        "GET /v1/catalog/pocket-image has its whole vocabulary."
    )
    assert error.param == "input.prompt"
    assert error.details["unknown"] == ["photo", "cat"]
    assert "circle" in error.details["known"]
    assert len(error.details["examples"]) == 3
    for example in error.details["examples"]:
        assert check("pocket-image", prompt=example) == ()


def test_refused_edit_has_examples_of_edits() -> None:
    error = refusal(
        "pocket-image", prompt="make the elephant teal", image="https://example.com/a.png"
    )

    assert error.details["examples"][0] == "make the circle blue"


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("pocket-video", {"prompt": "a dog runs on the beach"}),
        ("pocket-speech", {"text": "日本語"}),
        ("pocket-music", {"prompt": "saxophone", "mood": "calm"}),
    ],
)
def test_every_kind_of_model_refuses_what_it_does_not_understand(
    model: str, value: dict[str, Any]
) -> None:
    assert len(refusal(model, **value).details["examples"]) == 3


def test_negative_prompt_is_warned_of_and_never_refused() -> None:
    (warning,) = check("pocket-image", prompt="a red star", negative_prompt="cats")

    assert (warning.field, warning.unknown) == ("input.negative_prompt", ("cats",))


def test_input_without_a_prompt_is_not_checked() -> None:
    assert check("pocket-video", image="https://example.com/a.png", prompt=" ") == ()


def test_entry_without_examples_names_words_that_it_knows() -> None:
    bare = ENTRIES["pocket-image"].model_copy(update={"examples": ()})

    with pytest.raises(InvalidRequest, match=r'It knows "above", "add", .*, …\. GET /v1'):
        check_understood(bare, {"prompt": "cat"}, prefix="")


# --- Workflows ------------------------------------------------------------------------------------


def planned(sold: CatalogEntry, **inputs: Any) -> PlannedRun:
    models = StepModels(
        entry=ENTRIES.__getitem__,
        priced=lambda name: (0, ENTRIES[name].selling_price),
        own=sold.selling_price,
    )
    return plan(sold, WorkflowSubmission(inputs), models, prefix="input")


def test_workflow_names_the_input_that_a_step_does_not_understand() -> None:
    image = "https://example.com/portrait.png"
    sold = ENTRIES["pocket-talking-head"]

    (warning,) = planned(sold, image=image, text="Hello 日本").warnings

    assert (warning.field, warning.unknown) == ("input.text", ("日本",))
    with pytest.raises(InvalidRequest, match=r"nothing of input\.text") as refused:
        planned(sold, image=image, text="😀")
    assert refused.value.param == "input.text"


def test_text_that_a_step_writes_is_not_known_yet() -> None:
    sold = CatalogEntry.model_validate(
        {
            "name": "told",
            "task": "text-to-image",
            "price": "steps",
            "workflow": {
                "inputs": {"subject": {"type": "text"}, "style": {"type": "text"}},
                "steps": [
                    {
                        "name": "write",
                        "model": "pocket-chat",
                        "input": {"messages": [{"role": "user", "content": "${inputs.subject}"}]},
                        "characters": 100,
                    },
                    {
                        "name": "draw",
                        "model": "pocket-image",
                        "input": {
                            "prompt": "${steps.write}",
                            "negative_prompt": "no ${inputs.style} red",
                        },
                    },
                ],
                "output": "${steps.draw}",
            },
        }
    )

    (warning,) = planned(sold, subject="cats", style="teal").warnings

    assert (warning.field, warning.unknown) == ("steps.draw.negative_prompt", ("no", "teal"))
