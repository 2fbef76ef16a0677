"""What was sent with an earlier request, in the form again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.workflow import FIELDS
from gateway.console.playground.again import carried
from gateway.console.playground.fields import fields_of, forms_of
from gateway.console.playground.orders import input_of
from gateway.console.playground.origins import origins_in
from gateway.console.playground.parts import FormName, make_field
from tests.console.test_playground import SHIPPED, filled


@pytest.fixture(scope="module")
def entries() -> Mapping[str, CatalogEntry]:
    return {entry.name: entry for entry in load_catalog(SHIPPED).models}


def numbered(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input as it is kept, with numbers in place of its files."""
    sent = {name: {"attachment": 0} if name in FIELDS else value for name, value in made.items()}
    return json.loads(json.dumps(sent))  # type: ignore[no-any-return]  # an object


def test_every_field_that_the_playground_sends_is_carried_back(
    entries: Mapping[str, CatalogEntry],
) -> None:
    for entry in entries.values():
        for form in forms_of(entry):
            check(entry, form)


def check(entry: CatalogEntry, form: FormName) -> None:
    fields = fields_of(entry, form)
    files = {each.name for each in fields if each.kind == "file"}
    values = filled(entry, form)
    if form == "text-generation" and entry.workflow is None:
        values |= {"tools": '[{"name": "f"}]', "schema": '{"type": "object"}'}
    made = input_of(entry, form, values)

    again = carried("req_1", numbered(made), fields)

    texts = {name: value for name, value in again.values.items() if not name.startswith("from-")}
    texts_made = input_of(entry, form, texts)
    assert texts_made == {
        name: value for name, value in made.items() if name not in files | {"image"}
    }
    carried_files = {name.removeprefix("from-") for name in again.values} & files
    assert len(carried_files) == len(files)
    assert again.lost == []


def test_what_has_no_field_is_named(entries: Mapping[str, CatalogEntry]) -> None:
    sent = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2}

    again = carried("req_1", sent, fields_of(entries["pocket-chat"], "text-generation"))

    assert again.values == {"message": "a", "messages": "[]", "logprobs": "true"}
    assert again.lost == ["n"]


@pytest.mark.parametrize(
    ("sent", "lost"),
    [
        ({"stop": ["\n\n"]}, "stop"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (
            {"response_format": {"json_schema": {"name": "a", "schema": {}, "strict": True}}},
            "response_format.strict",
        ),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"temperature": 0.123456789}, None),
        ({"stop": "END"}, None),
    ],
)
def test_what_a_field_cannot_have_is_named(
    sent: dict[str, Any], lost: str | None, entries: Mapping[str, CatalogEntry]
) -> None:
    form: FormName = "text-completion" if "prompt" in sent else "text-generation"
    fields = fields_of(entries["pocket-chat"], form)

    again = carried("req_1", sent, fields)

    assert again.lost == ([lost] if lost else [])
    if lost is None:
        assert again.values == {name: str(value) for name, value in sent.items()}


def test_lines_and_several_files_are_carried() -> None:
    fields = [make_field("documents", "text"), make_field("images", "file")]
    sent = {"documents": ["a", " b"], "images": [{"attachment": 1}, {"attachment": 0}]}

    again = carried("req_1", sent, fields)
    origins = origins_in(fields, again.values)

    assert again.values["documents"] == "a\n b"
    assert [each.place for each in origins["images"]] == ["req_1/sent-1", "req_1/sent-0"]
    for texts in (["a\nb"], [""], ["a", {"text": "b"}]):
        assert carried("req_1", {"documents": texts}, fields).lost == ["documents"]


def test_pictures_of_a_conversation_are_those_that_were_sent(
    entries: Mapping[str, CatalogEntry],
) -> None:
    picture = {"type": "image_url", "image_url": {"url": {"attachment": 0}, "detail": "low"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}

    again = carried(
        "req_1", {"messages": [asked]}, fields_of(entries["pocket-chat"], "text-generation")
    )

    (message,) = json.loads(again.values["messages"])
    assert message["content"][1]["image_url"] == {"url": "req_1/sent-0", "detail": "low"}
    assert again.lost == []
