"""Requests of other clients: fields that helpers add, OpenRouter's options, browsers."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from gateway.app import cors_of
from gateway.settings import Settings
from tests.stack import Stack, chat

ORIGIN = "https://chat.example.com"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
ASK: Any = [{"role": "user", "content": "the fox"}]


class Scene(BaseModel):
    shape: str


def client(stack: Stack, secret: str) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=secret, max_retries=0)
    stack.clients.append(made)
    return made


# --- Messages of helpers go back as they came ----------------------------------------------------


def test_parsed_function_call_can_be_sent_back_with_its_result(text_stack: Stack) -> None:
    completions = client(text_stack, text_stack.caller().secret).chat.completions
    message = (
        completions.parse(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200
        )
        .choices[0]
        .message
    )
    call = (message.tool_calls or [])[0]
    assert call.function.parsed_arguments is not None

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history: Any = [*ASK, message, result]
    answer = completions.create(model="tiny", messages=history, tools=TOOLS, max_tokens=5)

    assert answer.usage is not None


def test_streamed_function_call_can_be_sent_back_with_its_result(text_stack: Stack) -> None:
    completions = client(text_stack, text_stack.caller().secret).chat.completions
    with completions.stream(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    call = (message.tool_calls or [])[0]

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history: Any = [*ASK, message, result]
    answer = completions.create(model="tiny", messages=history, tools=TOOLS, max_tokens=5)

    assert answer.usage is not None


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x", "parsed": None},
        {"content": "x", "parsed": {"shape": "star"}},
        {"content": "x", "reasoning_content": "I thought."},
        {"content": "x", "reasoning": "I thought.", "reasoning_details": []},
        {"content": "x", "provider_specific_fields": {"a": 1}, "thinking_blocks": []},
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {
            "content": None,
            "tool_calls": [
                {
                    "index": 0,
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
                }
            ],
        },
    ],
)
def test_fields_added_by_client_helpers_are_accepted(stack: Stack, message: dict[str, Any]) -> None:
    body = chat("echo", "hi", max_tokens=2)
    body["messages"] += [{"role": "assistant", **message}, {"role": "user", "content": "go on"}]

    assert stack.caller().http.post("/v1/chat/completions", json=body).status_code == 200


def test_image_for_a_text_model_is_refused_by_name(stack: Stack) -> None:
    caller = stack.caller()
    part = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    body = chat("echo", "hi")
    body["messages"][0]["content"] = [{"type": "text", "text": "What is this?"}, part]

    answer = caller.http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == ("echo reads no images; messages.0.content.1 is of type image_url.")
    assert error["param"] == "messages.0.content.1"
    assert stack.held(caller) == 0


# --- OpenRouter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"usage": {"include": True}},
        {"transforms": [], "plugins": [], "route": "fallback", "top_a": 0},
        {"provider": {"order": ["openai"], "sort": "price", "data_collection": "deny"}},
        {"provider": {"only": ["tollgate"], "max_price": {"prompt": 0.02, "completion": "0.08"}}},
        {"include_reasoning": True, "session_id": "s", "trace": {"a": 1}, "user": "u"},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"exclude": True}},
    ],
)
def test_openrouter_options_without_an_effect_are_accepted(
    stack: Stack, more: dict[str, Any]
) -> None:
    body = {**chat("echo", "hi", max_tokens=2), **more}

    answer = stack.caller().http.post("/api/v1/chat/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.json()["system_fingerprint"] is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"transforms": ["middle-out"]}, "transforms"),
        ({"plugins": [{"id": "web"}]}, "plugins"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"provider": {"only": ["openai"]}}, "provider.only"),
        ({"provider": {"order": ["openai"], "allow_fallbacks": False}}, "provider.order"),
        ({"provider": {"ignore": ["tollgate"]}}, "provider.ignore"),
        ({"provider": {"max_price": {"prompt": 0.01}}}, "provider.max_price.prompt"),
        ({"provider": {"max_price": {"completion": 0.07}}}, "provider.max_price.completion"),
    ],
)
def test_unsupported_openrouter_options_are_refused(
    stack: Stack, more: dict[str, Any], param: str
) -> None:
    caller = stack.caller()

    answer = caller.http.post("/api/v1/chat/completions", json={**chat("echo", "hi"), **more})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert stack.held(caller) == 0


@pytest.mark.parametrize("named", [["Veo9", "Veo3", "echo"], ["echo"]])
def test_first_available_model_answers(stack: Stack, named: list[str]) -> None:
    body = {**chat("", "hi", max_tokens=2), "models": named}
    del body["model"]

    answer = stack.caller().http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200
    assert answer.json()["model"] == "echo"


def test_chat_without_a_model_is_refused(stack: Stack) -> None:
    body = chat("", "hi")
    del body["model"]

    answer = stack.caller().http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


def test_openrouters_base_url_serves_its_clients(stack: Stack) -> None:
    http = stack.caller().http

    listed = http.get("/api/v1/models").json()
    assert listed["total_count"] == len(listed["data"])
    assert listed["links"] == {"next": None}
    assert all(model["architecture"]["tokenizer"] for model in listed["data"])
    (endpoint,) = http.get("/api/v1/models/echo/endpoints").json()["data"]["endpoints"]
    assert endpoint["provider_name"] == "tollgate"
    assert endpoint["pricing"]["prompt"] == "0.00000002"
    assert endpoint["supports_tool_choice"]["required"] is True
    free = http.get("/api/v1/key").json()["data"]["free_model_daily_requests"]
    assert free == {"limit": 0, "remaining": 0, "used": 0}
    assert http.get("/api/v1/auth/key").json() == http.get("/api/v1/key").json()
    assert http.get("/api/v1/providers").json()["data"][0]["slug"] == "tollgate"


# --- Retries, browsers ---------------------------------------------------------------------------


def test_clients_do_not_retry_an_unconfigured_model(stack: Stack) -> None:
    calls = []
    with httpx.Client(event_hooks={"response": [lambda answer: calls.append(answer)]}) as http:
        asking = openai.OpenAI(
            base_url=f"{stack.url}/v1",
            api_key=stack.caller().secret,
            max_retries=2,
            http_client=http,
        )
        with pytest.raises(openai.InternalServerError, match="not set up on this gateway"):
            asking.post("/videos", cast_to=object, body={"model": "Veo3", "prompt": "a fox"})

    assert len(calls) == 1
    assert calls[0].headers["x-should-retry"] == "false"
    assert "GMI_API_KEY" not in calls[0].text


def test_page_of_an_allowed_origin_can_call_and_read_the_cost(stack: Stack) -> None:
    caller = stack.caller()
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    preflight = httpx.options(f"{stack.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]

    body = chat("echo", "hi", max_tokens=2)
    answer = caller.http.post("/v1/chat/completions", json=body, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "X-Request-Cost" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers

    refused = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_page_of_another_origin_cannot_call(stack: Stack) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}

    preflight = httpx.options(f"{stack.url}/v1/chat/completions", headers=asked)

    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers


def test_without_allowed_origins_no_page_can_call() -> None:
    assert cors_of(Settings()) is None


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a/b", "https://a b"])
def test_invalid_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ValueError, match="TOLLGATE_CORS_ORIGINS"):
        Settings(cors_origins=origin)


def test_front_page_is_served_to_browsers(stack: Stack) -> None:
    page = httpx.get(stack.url, headers={"Accept": "text/html"})

    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert 'href="/schema"' in page.text
