"""Errors within unions name the alternative that fits best, at the client's path."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from gateway.api.http.bodies import read_body
from gateway.api.openai.chat import ChatCompletion
from gateway.api.openai.images_bodies import ImageBody
from gateway.api.openai.responses_bodies import ResponseBody
from gateway.errors import InvalidRequest

ASK: dict[str, Any] = {"role": "user", "content": "hi"}


def told(schema: type[BaseModel], **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_body(schema, {"model": "m", **body})
    return caught.value


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"messages": [ASK], "stop": ["a", "b", "c", "d", "e"]},
            "stop",
            "List should have at most 4 items after validation, not 5",
        ),
        (
            {"messages": [ASK], "stop": 5},
            "stop",
            "Input should be a valid string or a valid list (got 5)",
        ),
        (
            said([{"type": "text", "text": "a"}, {"type": "picture", "url": "b"}]),
            "messages.0.content.1.type",
            "'image_url'",
        ),
        (said([{"type": "text", "text": 5}]), "messages.0.content.0.text", "valid string"),
        (said([{"type": "text"}]), "messages.0.content.0.text", "Missing required parameter"),
        (
            said([{"type": "text", "text": "a", "colour": 1}]),
            "messages.0.content.0.colour",
            "Unknown parameter",
        ),
        (said(5), "messages.0.content", "a valid string or a valid list (got 5)"),
        ({"messages": [ASK], "temperature": "hot"}, "temperature", '(got "hot")'),
        ({"messages": [ASK], "tool_choice": "always"}, "tool_choice", "'none', 'auto'"),
        (
            {"messages": [ASK], "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "Missing required parameter",
        ),
    ],
)
def test_a_chat_names_the_field_at_fault(body: dict[str, Any], param: str, message: str) -> None:
    error = told(ChatCompletion, **body)

    assert error.param == param
    assert message in error.message
    assert "list[" not in error.message


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        ({"type": "computer_call"}, "input.0.type", "'function_call'"),
        ({"role": "user", "content": [{"type": "x"}]}, "input.0.content.0.type", "'input_text'"),
        ({"type": "function_call", "name": "f"}, "input.0.call_id", "Missing"),
        ({"role": "judge", "content": "a"}, "input.0.role", "'system'"),
    ],
)
def test_a_response_names_the_item_at_fault(item: dict[str, Any], param: str, message: str) -> None:
    error = told(ResponseBody, input=[item])

    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (
            {"role": "user", "content": [{"type": "input_file", "file_url": "https://a/b"}]},
            "input.0.content.0",
        ),
        ({"type": "item_reference", "id": "msg_1"}, "input.0"),
    ],
)
def test_response_refuses_unreadable_items_by_name(item: dict[str, Any], param: str) -> None:
    body = read_body(ResponseBody, {"model": "m", "input": [item]})

    with pytest.raises(InvalidRequest, match=param.replace(".", r"\.")) as caught:
        body.generation()

    assert caught.value.param == param
    assert caught.value.code == "unsupported_content"


@pytest.mark.parametrize("part", [{}, {"image_url": "https://a/b", "file_id": "file-1"}])
def test_picture_of_a_response_has_one_source(part: dict[str, Any]) -> None:
    item = {"role": "user", "content": [{"type": "input_image", **part}]}
    body = read_body(ResponseBody, {"model": "m", "input": [item]})

    with pytest.raises(InvalidRequest, match="needs either image_url or file_id") as caught:
        body.generation()

    assert caught.value.param == "input.0.content.0"


@pytest.mark.parametrize(
    "more",
    [
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"effort": "none"}},
        {"truncation": "auto"},
        {"text": {"verbosity": "low"}},
        {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}, ASK]},
    ],
)
def test_response_accepts_options_without_an_effect(more: dict[str, Any]) -> None:
    body = read_body(ResponseBody, {"model": "m", "input": "hi", **more})

    (message,) = body.generation().messages
    assert message.text == "hi"


def test_requested_reasoning_is_refused_by_name() -> None:
    body = read_body(ResponseBody, {"model": "m", "input": "hi", "reasoning": {"effort": "low"}})

    with pytest.raises(InvalidRequest, match="reasoning is not supported"):
        body.generation()


def test_invalid_image_field_is_reported_without_pydantics_terms() -> None:
    error = told(ImageBody, prompt="a", n="many")

    assert error.param == "n"
    assert error.message.endswith('(got "many").')
