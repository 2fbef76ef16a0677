"""Mistakes in a workflow are reported with their place when the catalog is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.catalog.loader import check, load_catalog
from tests.workflows.conftest import CATALOG, MODELS
from workers.contract.models import read_specs

ENTRY = """\
  - name: tried
    task: text-to-image
    price: {price}
    workflow:
      inputs: {{prompt: {{type: text}}, photo: {{type: image, optional: true}}}}
      steps:
        - {{name: draw, model: draw, input: {{prompt: "${{inputs.prompt}}"}}}}
        - {step}
      output: {output}
"""
GOOD = '{name: big, model: enlarge, input: {image: "${steps.draw}"}}'


def problems(
    tmp_path: Path, *, step: str = GOOD, output: str = "${steps.big}", price: str = "steps"
) -> str:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG + ENTRY.format(step=step, output=output, price=price))
    return "\n".join(str(problem) for problem in check(path))


def test_valid_workflow_has_no_problems_and_is_unknown_to_workers(tmp_path: Path) -> None:
    assert problems(tmp_path) == ""
    path = tmp_path / "catalog.yaml"
    assert {spec.name for spec in read_specs(path)} == set(MODELS)
    assert load_catalog(path).models[-1].discount is None


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ('{name: big, model: none, input: {image: "${steps.draw}"}}', "unknown model 'none'"),
        ('{name: big, model: short, input: {prompt: "${steps.draw}"}}', "is a workflow"),
        ("{name: big, model: enlarge, task: image-edit, input: {a: b}}", "not image-edit"),
        ('{name: big, model: enlarge, input: {image: "${steps.gone}"}}', "steps.gone does not"),
        ('{name: big, model: enlarge, input: {image: "${inputs.gone}"}}', "inputs.gone does not"),
        ('{name: big, model: enlarge, input: {image: "${steps.draw.text}"}}', "produces image"),
        ('{name: big, model: enlarge, input: {image: "${inputs.prompt}"}}', "is text, but image"),
        ('{name: big, model: draw, input: {prompt: "${steps.draw}"}}', "but prompt holds text"),
        ('{name: big, model: film, input: {video: "${steps.draw}"}}', "but video holds video"),
        ('{name: big, model: write, input: {image: "${steps.draw}"}}', "does not read"),
        ('{name: big, model: enlarge, input: {image: "a ${steps.draw}"}}', "only content"),
        ('{name: big, model: enlarge, input: {image: "${steps.big}"}}', "wait for each other"),
        ('{name: big, model: enlarge, input: {image: "${steps.draw"}}', "without a closing }"),
        ('{name: big, model: enlarge, input: {image: "${draw}"}}', "not a valid reference"),
        ('{name: draw, model: enlarge, input: {image: "${steps.draw}"}}', "already the name"),
        ("{name: big, model: enlarge, when: inputs.prompt, input: {a: b}}", "is not optional"),
        ("{name: big, model: enlarge, when: inputs.x, input: {a: b}}", "unknown input 'x'"),
        ("{name: big, model: enlarge, when: never, input: {a: b}}", "not a valid condition"),
        (
            "{name: big, model: write, vote: {n: 1}, input: {a: b}}",
            "vote.n of tried: should be greater",
        ),
        (
            "{name: big, model: write, vote: {n: 9}, input: {a: b}}",
            "vote.n of tried: should be less",
        ),
        ("{name: big, model: enlarge, vote: {n: 2}, input: {a: b}}", "only texts can be chosen"),
        (
            "{name: big, model: write, best_of: {n: 2, judge: draw}, input: {a: b}}",
            "best_of.judge of tried: draw does text-to-image, image-to-image, not text-generation",
        ),
        (
            "{name: big, model: write, vote: {n: 2, models: [write, none]}, input: {a: b}}",
            "vote.models[1] of tried: unknown model 'none'",
        ),
        (
            "{name: big, model: write, vote: {n: 2, models: [write, write, write]}, input: {a: b}}",
            "3 models for 2 candidates; raise `n`",
        ),
        (
            "{name: big, model: write, vote: {n: 2}, best_of: {n: 2, judge: write}, input: {a: b}}",
            "a step has either `best_of` or `vote`",
        ),
        ("{name: big, model: write, best_of: {n: 2}, input: {a: b}}", "'judge' is missing"),
    ],
)
def test_invalid_step_is_refused(tmp_path: Path, step: str, said: str) -> None:
    assert said in problems(tmp_path, step=step)


def test_output_and_price_must_fit(tmp_path: Path) -> None:
    assert "is not a valid output" in problems(tmp_path, output="${inputs.prompt}")
    assert "the output of step big is never used" in problems(tmp_path, output="${steps.draw}")
    words = '{name: big, model: write, input: {messages: "${inputs.prompt}"}}'
    assert "produces text, but text-to-image produces image" in problems(tmp_path, step=words)
    price = '[{unit: step, amount: "0.1"}]'
    assert "must be per image, request, or `price: steps`" in problems(tmp_path, price=price)
    text = CATALOG.replace('price: [{unit: image, amount: "0.0005"}]', "price: steps")
    (tmp_path / "catalog.yaml").write_text(text)
    (found,) = check(tmp_path / "catalog.yaml")
    assert "only a workflow can be priced by its steps" in found.message
