"""Forms of the playground, what they send, and why they are refused."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.console.playground.code import code_of
from gateway.console.playground.fields import fields_of, read_input
from gateway.console.playground.pages import NAMES
from gateway.console.views.outputs import vectors_text
from gateway.errors import InvalidRequest
from gateway.files.sources import SentSource
from gateway.tasks.registry import parse
from tests.console.visiting import FORM, Browser, Installation

SHIPPED = Path(__file__).parents[2] / "catalog.yaml"
ORDER = "/console/playground/order"
QUOTE = "/console/playground/quote"
JSON = {**FORM, "Accept": "application/json"}


@pytest.fixture(scope="module")
def entries() -> Mapping[str, CatalogEntry]:
    return {entry.name: entry for entry in load_catalog(SHIPPED).models}


async def _nothing() -> Any:
    yield b""


def filled(entry: CatalogEntry, task: Task) -> dict[str, Any]:
    """Fill every field of a form as a person could."""
    values: dict[str, Any] = {}
    for field in fields_of(entry, task):
        if field.kind == "file":
            values[field.name] = [SentSource(_nothing)]
        elif field.options:
            values[field.name] = field.options[0]
        elif field.kind == "number":
            values[field.name] = field.default or f"{field.least or 1:g}"
        else:
            values[field.name] = field.default or "en a circle"
    return values


def test_form_of_every_model_makes_an_input_that_its_task_reads(
    entries: Mapping[str, CatalogEntry],
) -> None:
    for entry in entries.values():
        for task in (entry.task, *entry.also):
            made = read_input(fields_of(entry, task), task, filled(entry, task))
            if entry.workflow is not None:
                assert set(made) == set(entry.workflow.inputs)
            elif task != "text-generation":
                parse(task, made)


def test_every_task_has_a_tab(entries: Mapping[str, CatalogEntry]) -> None:
    assert {task for entry in entries.values() for task in (entry.task, *entry.also)} <= set(NAMES)


def test_field_that_is_no_number_is_named(entries: Mapping[str, CatalogEntry]) -> None:
    fields = fields_of(entries["pocket-image"], "text-to-image")

    with pytest.raises(InvalidRequest) as refused:
        read_input(fields, "text-to-image", {"prompt": "a circle", "n": "two"})

    assert refused.value.param == "n"
    assert "'two' is not a whole number" in refused.value.message


def test_code_sends_the_body_and_no_key() -> None:
    body = {"model": "echo", "input": {"messages": [{"role": "user", "content": 'it\'s "so"'}]}}

    code = code_of("http://127.0.0.1:8000", body)

    sent = {"model": "echo", **body["input"]}  # type: ignore[dict-item]  # a dict
    shell = code["curl"].partition("-d '")[2].removesuffix("'").replace("'\\''", "'")
    assert json.loads(shell) == sent
    call = ast.parse(code["Python"]).body[2]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    given = next(each for each in call.value.keywords if each.arg == "json")
    assert ast.literal_eval(given.value) == sent
    assert all("TOLLGATE_API_KEY" in text and "tg_" not in text for text in code.values())


def order(browser: Browser, **fields: str) -> Any:
    return browser.post(ORDER, {"model": "echo", "task": "text-generation", **fields}, headers=JSON)


def test_quote_is_that_of_the_api_and_comes_with_code(installation: Installation) -> None:
    browser = installation.visitor("viewer")

    form = {"model": "echo", "task": "text-generation", "message": "one", "max_tokens": "10"}
    quoted = browser.post(QUOTE, form, headers=JSON).json()

    secret, _ = installation.key()
    body = {"model": "echo", "max_tokens": 10, "messages": [{"role": "user", "content": "one"}]}
    asked = installation.client.post(
        "/v1/quote", json=body, headers={"Authorization": f"Bearer {secret}"}
    )
    assert quoted["most"] == f"${asked.json()['max_cost']}"
    assert set(quoted["code"]) == {"curl", "Python", "JavaScript"}


def test_refusals_are_those_of_the_api(installation: Installation) -> None:
    browser = installation.visitor("member")

    missing = order(browser)
    unserved = order(browser, message="one")
    strange = order(browser, message="one", max_tokens="many")
    page = browser.post(
        ORDER,
        {"model": "echo", "task": "text-generation", "message": "kept"},
        headers={**FORM, "Accept": "text/html"},
    )

    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "message")
    assert unserved.status_code == page.status_code == 503
    assert strange.json()["error"]["param"] == "max_tokens"
    assert "kept</textarea>" in page.text
    assert "echo is not available" in page.text


def test_page_needs_an_account(installation: Installation) -> None:
    assert installation.visitor("operator").get("/console/playground").status_code == 404
    assert installation.visitor(None).get("/console/playground").status_code == 303


def test_embeddings_are_shown_by_their_first_numbers_and_cosines() -> None:
    vectors = [struct.pack("<8f", *numbers) for numbers in ([1.0] + [0.0] * 7, [1.0] * 8)]

    shown = vectors_text(vectors).splitlines()

    assert shown[0] == "1: 8 numbers, 1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, …"
    assert shown[2] == "cosine of 1 and 2: 0.3536"
    assert vectors_text([]) == ""
