"""Functions, schemas, completions and responses through the unmodified client, by a real engine."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.stack import Caller, Stack, chat, ended, wait_for

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
FLAT_TOOLS: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
ASK: Any = [{"role": "user", "content": "the fox"}]


class Scene(BaseModel):
    shape: Literal["circle", "star"]
    size: Annotated[int, Field(ge=0, le=99)]


def client(stack: Stack, caller: Caller | None = None) -> openai.OpenAI:
    secret = (caller or stack.caller()).secret
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=secret, max_retries=0)
    stack.clients.append(made)
    return made


# --- Functions and schemas -----------------------------------------------------------------------


def test_function_result_is_accepted_in_the_next_message(text_stack: Stack) -> None:
    ask = client(text_stack).chat.completions
    first = ask.create(
        model="tiny",
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )

    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")

    history = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = ask.create(model="tiny", messages=history, tools=TOOLS, max_tokens=5)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_client_assembles_a_streamed_function_call(text_stack: Stack) -> None:
    made = client(text_stack).chat.completions
    with made.stream(
        model="tiny",
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=200,
        seed=3,
        temperature=1.0,
    ) as stream:
        completion = stream.get_final_completion()

    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    whole = made.create(
        model="tiny",
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=200,
        seed=3,
        temperature=1.0,
    )
    streamed = [call.function.arguments for call in choice.message.tool_calls or []]
    assert streamed
    assert streamed == [
        call.function.arguments for call in whole.choices[0].message.tool_calls or []
    ]


def test_an_answer_is_parsed_into_the_clients_own_type(text_stack: Stack) -> None:
    answer = client(text_stack).chat.completions.parse(
        model="tiny", messages=ASK, response_format=Scene, max_tokens=400, seed=1
    )

    assert isinstance(answer.choices[0].message.parsed, Scene)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools.1.function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": "no"}]},
            "messages.1.tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "strange"}},
                }
            },
            "response_format",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
    ],
)
def test_contradicting_options_are_refused_and_not_charged(
    body: dict[str, Any], param: str, text_stack: Stack
) -> None:
    caller = text_stack.caller()

    answer = caller.http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": ASK, **body}
    )

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    balance = caller.http.get("/v1/balance").json()
    assert (balance["posted"], balance["held"]) == ("1", "0")


def test_a_schema_that_is_too_deep_or_too_large_is_refused(text_stack: Stack) -> None:
    caller = text_stack.caller()
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    for schema in (deep, {"description": "x" * 70_000}):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = caller.http.post(
            "/v1/chat/completions", json=chat("tiny", "x", response_format=format)
        )

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"


# --- Completions ---------------------------------------------------------------------------------


def test_texts_are_continued_and_charged_as_one_request(text_stack: Stack) -> None:
    caller = text_stack.caller()
    made = client(text_stack, caller).completions

    raw = made.with_raw_response.create(
        model="tiny", prompt=["the quick", "a lazy"], n=2, max_tokens=6, logprobs=2, temperature=0
    )

    answer = raw.parse()
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.text_offset) <= 6
    assert len((logprobs.top_logprobs or [{}])[0]) == 2
    receipt = caller.http.get(f"/v1/requests/{raw.headers['x-request-id']}/receipt").json()
    assert Decimal(receipt["cost"]) == Decimal(raw.headers["x-request-cost"])


def test_streamed_completion_equals_the_unstreamed_one(text_stack: Stack) -> None:
    made = client(text_stack).completions
    given: Any = {"model": "tiny", "prompt": "the quick", "max_tokens": 20, "temperature": 0}

    chunks = list(made.create(**given, stream=True, stream_options={"include_usage": True}))

    said = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert said == made.create(**given).choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_token_ids_are_a_prompt_and_the_length_defaults_to_sixteen(text_stack: Stack) -> None:
    made = client(text_stack).completions

    answer = made.create(model="tiny", prompt=[10, 11, 12], echo=True, temperature=0)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["x"] * 3, "n": 2}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 100_000]}, "prompt"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_unsupported_completion_options_are_refused_by_name(
    body: dict[str, Any], param: str, text_stack: Stack
) -> None:
    answer = text_stack.caller().http.post("/v1/completions", json={"model": "tiny", **body})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


# --- Responses -----------------------------------------------------------------------------------


def test_response_is_answered_stored_and_deleted(text_stack: Stack) -> None:
    caller = text_stack.caller()
    made = client(text_stack, caller).responses

    answer = made.create(
        model="tiny", input="the fox", instructions="be brief", max_output_tokens=200, temperature=0
    )

    assert answer.status in ("completed", "incomplete")
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    kept = made.retrieve(answer.id)
    assert kept.output_text == answer.output_text
    with pytest.raises(openai.NotFoundError):
        client(text_stack).responses.retrieve(answer.id)
    made.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        made.retrieve(answer.id)
    request_id = f"req_{answer.id.removeprefix('resp_')}"
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert receipt["outcome"] == "charged"


def test_response_is_not_stored_if_store_is_false(text_stack: Stack) -> None:
    made = client(text_stack).responses
    answer = made.create(model="tiny", input="the fox", max_output_tokens=16, store=False)

    with pytest.raises(openai.NotFoundError):
        made.retrieve(answer.id)
    events = made.create(
        model="tiny", input="the fox", max_output_tokens=16, store=False, stream=True
    )
    ends = ("response.completed", "response.incomplete")
    id = next(event.response.id for event in events if event.type in ends)
    events.close()

    def is_gone() -> bool:
        try:
            made.retrieve(id)
        except openai.NotFoundError:
            return True
        return False

    wait_for(is_gone, "the output to be forgotten")


def test_events_of_a_streamed_response_are_in_order(text_stack: Stack) -> None:
    made = client(text_stack).responses

    asked: Any = {"model": "tiny", "input": "the fox", "max_output_tokens": 8, "temperature": 0}
    events = list(made.create(**asked, stream=True))

    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert final.response.incomplete_details.reason == "max_output_tokens"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.response.output_text == said


def test_streamed_response_can_contain_a_function_call(text_stack: Stack) -> None:
    made = client(text_stack).responses
    with made.stream(
        model="tiny",
        input="the fox",
        tools=FLAT_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    ) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()

    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert "response.function_call_arguments.done" in kinds
    history: Any = [
        {"role": "user", "content": "the fox"},
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        },
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert made.create(model="tiny", input=history, tools=FLAT_TOOLS, max_output_tokens=5).output


def test_a_response_is_parsed_into_the_clients_own_type(text_stack: Stack) -> None:
    answer = client(text_stack).responses.parse(
        model="tiny", input="the fox", text_format=Scene, max_output_tokens=400
    )

    assert isinstance(answer.output_parsed, Scene)


def test_a_response_in_the_background_is_fetched_followed_and_cancelled(stack: Stack) -> None:
    caller = stack.caller()
    made = client(stack, caller).responses
    words = " ".join(f"w{number}" for number in range(12))

    started = made.create(model="slow", input=words, background=True)

    assert started.status in ("queued", "in_progress")
    followed = list(made.retrieve(started.id, stream=True))
    assert followed[-1].type == "response.completed"
    assert followed[-1].response.output_text == words
    place = len(followed) // 2
    rest = list(made.retrieve(started.id, stream=True, starting_after=place))
    assert [event.sequence_number for event in rest] == list(range(place + 1, len(followed)))
    (last,) = made.retrieve(started.id, stream=True, starting_after=9000)
    assert last.type == "response.completed"
    assert made.retrieve(started.id).status == "completed"

    long = made.create(model="slow", input=" ".join(["x"] * 300), background=True)
    made.cancel(long.id)
    wait_for(lambda: made.retrieve(long.id).status == "cancelled", "the cancelled response")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": []}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_unsupported_response_options_are_refused_by_name(
    body: dict[str, Any], param: str, text_stack: Stack
) -> None:
    answer = text_stack.caller().http.post("/v1/responses", json={"model": "tiny", **body})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


# --- The prefix cache ----------------------------------------------------------------------------


def test_repeated_prompt_is_cached_for_the_same_account_only(text_stack: Stack) -> None:
    caller, other = text_stack.caller(), text_stack.caller()
    long: Any = [{"role": "user", "content": "the quick brown fox jumps over a lazy dog " * 12}]

    def ask(who: Caller) -> tuple[int, str | None]:
        answer = client(text_stack, who).chat.completions.create(
            model="tiny", messages=long, max_tokens=8, temperature=0
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        return details.cached_tokens or 0, answer.choices[0].message.content

    first, second, theirs = ask(caller), ask(caller), ask(other)

    assert (first[0], theirs[0]) == (0, 0)
    assert second[0] > 0
    assert second[0] % 64 == 0
    assert first[1] == second[1] == theirs[1]


# --- The native API ------------------------------------------------------------------------------


def test_native_api_accepts_prompts_and_functions(text_stack: Stack) -> None:
    caller = text_stack.caller()
    inputs: list[dict[str, Any]] = [
        {"prompt": ["the fox", "a dog"], "max_tokens": 4},
        {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300},
    ]
    for value in inputs:
        accepted = caller.http.post("/v1/requests", json={"model": "tiny", "input": value})
        assert accepted.status_code == 202, accepted.text
        found = ended(caller, accepted.json()["id"])
        assert found["status"] == "succeeded"
        if "prompt" in value:
            assert len(found["output"]["choices"]) == 2
        else:
            assert found["output"]["choices"][0]["tool_calls"][0]["name"] == "get_weather"
