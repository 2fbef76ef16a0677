"""Answers constrained to a schema, function calling, and raw prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.llm.checkpoints import (
    TOOLS_TEMPLATE,
    Reference,
    make_checkpoint,
    make_engine,
    make_marked_tokenizer,
    make_tokenizer,
)
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from workers.contract.jobs import ChatInput, ChatMessage, Completed, Failed, Tool, ToolCall
from workers.engines.llm.grammar import GrammarError
from workers.engines.llm.tools import format_of, make_reader
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["star", "circle"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["shape", "size", "tags"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get_weather",
    "Tell the weather.",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool("now", "Tell the time.")


PLACE = Tool(
    "place",
    "Name a place.",
    {
        "$defs": {"Side": {"enum": ["left", "right"]}},
        "properties": {"side": {"$ref": "#/$defs/Side"}, "note": {"enum": ["</tool_call>"]}},
        "required": ["side", "note"],
        "additionalProperties": False,
    },
)
CALLERS = {
    "no token": lambda: make_tokenizer(TOOLS_TEMPLATE),
    "qwen2": lambda: make_marked_tokenizer("qwen2"),
    "qwen3": lambda: make_marked_tokenizer("qwen3"),
    "special": lambda: make_marked_tokenizer("qwen2", special_calls=True),
    "llama": lambda: make_marked_tokenizer("llama"),
}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    return make_checkpoint("qwen3", path, template=TOOLS_TEMPLATE)


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", [None, {"method": "lookup", "tokens": 3}])
def test_answer_fits_the_schema(
    temperature: float, speculation: Any, checkpoint: Checkpoint
) -> None:
    engine = make_engine(checkpoint("qwen3"), speculation=speculation)
    for seed in range(4):
        wanted = job(
            "a",
            "the fox",
            max_tokens=300,
            temperature=temperature,
            seed=seed,
            response_format=_format(SCHEMA),
        )

        outcome = run_alone(engine, wanted)

        (choice,) = choices(outcome)
        answer = json.loads(choice["text"])
        assert choice["finish_reason"] == "stop"
        assert answer.keys() == SCHEMA["properties"].keys()
        assert answer["shape"] in ("star", "circle")
        assert 0 <= answer["size"] <= 99
        assert all(isinstance(tag, bool) for tag in answer["tags"])


def test_constraint_does_not_affect_other_requests(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("qwen3"))
    free = job("free", "a lazy dog", max_tokens=30, logprobs=True)
    alone = choices(run_alone(engine, free))
    driver = Driver(engine)
    driver.admit(job("json", "the fox", max_tokens=30, response_format={"type": "json_object"}))
    driver.admit(free)

    driver.finish("json", "free")

    assert choices(driver.outcomes["free"]) == alone
    assert texts(driver.outcomes["json"])[0].startswith("{")


@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"type": "string", "pattern": "(?<=a)b"}, {"$ref": "#/no"}]
)
def test_unsupported_schema_is_refused_with_the_reason(
    schema: dict[str, Any], checkpoint: Checkpoint
) -> None:
    driver = Driver(make_engine(checkpoint("llama")))

    answer = driver.admit(job("a", "x", response_format=_format(schema)))

    assert isinstance(answer, Failed)
    assert (answer.code, answer.param) == ("invalid_input", "response_format")
    assert "schema is not supported" in answer.message


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"tool_choice": "required"}, {"get_weather", "now"}),
        ({"tool_choice": "required", "tool_name": "get_weather"}, {"get_weather"}),
    ],
)
def test_required_function_is_called(
    asked: dict[str, Any], names: set[str], with_tools: Path
) -> None:
    engine = make_engine(with_tools)
    wanted = job(
        "a",
        "the fox",
        max_tokens=300,
        temperature=1.0,
        tools=(WEATHER, NOW),
        parallel_tool_calls=False,
        **asked,
    )

    driver = Driver(engine)
    driver.admit(wanted)
    driver.finish("a")

    (choice,) = choices(driver.outcomes["a"])
    (call,) = choice["tool_calls"]
    assert call["name"] in names
    if call["name"] == "get_weather":
        assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert (choice["text"], choice["finish_reason"]) == ("", "tool_calls")
    assert call["id"].startswith("call_")
    events = driver.events["a/0"]
    assert [made.id for event in events for made in event.tool_calls] == [call["id"]]
    assert driver.text("a/0") == ""
    assert choices(run_alone(engine, wanted)) == [choice], "a second attempt repeats the first"


@pytest.mark.parametrize("marks", CALLERS)
def test_required_call_works_with_every_kind_of_markers(marks: str, tmp_path: Path) -> None:
    tools = (WEATHER, NOW, PLACE)
    family = "llama" if marks == "llama" else "qwen2"
    path = make_checkpoint(family, tmp_path, tokenizer=CALLERS[marks]())
    driver = Driver(make_engine(path, slots=12))
    asked = {
        f"{name} {parallel} {seed}": {
            "tool_name": name,
            "parallel_tool_calls": parallel,
            "seed": seed,
        }
        for name in (None, "get_weather", "place")
        for parallel in (False, True)
        for seed in range(1)
    }
    for id, more in asked.items():
        wanted = {"tools": tools, "tool_choice": "required", "temperature": 1.0, **more}
        admission = driver.admit(job(id, "the fox", max_tokens=150, **wanted))
        assert isinstance(admission, Admitted), admission

    driver.finish(*asked)

    for id, more in asked.items():
        (choice,) = choices(driver.outcomes[id])
        assert choice["tool_calls"], choice
        for call in choice["tool_calls"]:
            assert call["name"] in ({tool.name for tool in tools} if id[0] == "N" else id)
            arguments = json.loads(call["arguments"])
            if call["name"] == "place":
                assert arguments["side"] in ("left", "right")
                assert arguments["note"] == "</tool_call>"
        if not more["parallel_tool_calls"] or marks == "llama":
            assert len(choice["tool_calls"]) == 1
        if choice["finish_reason"] == "tool_calls":
            assert choice["text"] == ""
        else:
            assert (choice["finish_reason"], more["parallel_tool_calls"]) == ("length", True)


def test_grammar_error_fails_only_its_own_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer(alphabet=False)  # has no brace, tilde or Z
    engine = make_engine(make_checkpoint("qwen3", tmp_path, tokenizer=tokenizer))
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
    driver = Driver(engine)
    for name, format in (("a", schema), ("b", {"type": "json_object"}), ("c", None)):
        driver.admit(job(name, "fox", max_tokens=30, temperature=1.0, response_format=format))

    driver.finish("a", "b", "c")

    assert texts(driver.outcomes["a"]) == ["null"]
    failed = driver.outcomes["b"]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert "could not be constrained to its schema" in failed.message
    assert [record.request_id for record in caplog.records if record.levelname == "ERROR"] == ["b"]
    assert isinstance(driver.outcomes["c"], Completed)
    assert "Warning" not in capfd.readouterr().err, "all warnings are in the log"


def test_mismatched_token_is_an_error_and_not_the_end(checkpoint: Checkpoint) -> None:
    grammars = make_engine(checkpoint("qwen3"))._model.checkpoint.vocabulary.grammars
    format = {"type": "json_object"}
    constraint = grammars.constrain(ChatInput((), 1, response_format=format), None)

    with pytest.raises(GrammarError):
        constraint.accept(1)
    with pytest.raises(GrammarError):
        constraint.packed()


def test_tool_parameters_must_be_an_object(with_tools: Path) -> None:
    driver = Driver(make_engine(with_tools))
    tool = Tool("f", "", {"type": "string"})

    answer = driver.admit(job("a", "x", tools=(tool,), tool_choice="required"))

    assert isinstance(answer, Failed)
    assert (answer.code, answer.param) == ("invalid_input", "tools")
    assert "type 'string', not 'object'" in answer.message


def test_tools_are_in_the_prompt_unless_tool_choice_is_none(with_tools: Path) -> None:
    engine = make_engine(with_tools)

    input_tokens = []
    for asked in ({}, {"tools": (NOW,)}, {"tools": (NOW,), "tool_choice": "none"}):
        outcome = run_alone(engine, job("a", "the fox", max_tokens=1, **asked))
        assert isinstance(outcome, Completed)
        input_tokens.append(outcome.usage.input_tokens + outcome.usage.cached_input_tokens)

    assert input_tokens[0] == input_tokens[2] < input_tokens[1]


def _read(template: str, *parts: str) -> tuple[str, list[tuple[str, str]]]:
    format = format_of(template)
    assert format is not None
    reader = make_reader(format, ChatInput((), 1, seed=7), 0)
    shown = "".join(reader.push(part) for part in parts) + reader.flush()
    return shown, [(call.name, call.arguments) for call in reader.calls]


HERMES = "{{ tools }}<tool_call>"
LLAMA = '{{ tools }}{"name": , "parameters": }'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("template", "text", "shown", "calls"),
    [
        (HERMES, "Hello <b>there</b>", "Hello <b>there</b>", []),
        (
            HERMES,
            'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>',
            "Well.\n",
            [("f", '{"a": "ü"}')],
        ),
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {"b": 1}}\n</tool_call>',
            "",
            [("f", "{}"), ("g", '{"b": 1}')],
        ),
        (HERMES, "<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", []),
        (HERMES, "<tool_call>\n{never", "<tool_call>\n{never", []),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "\\\\\\"</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "\\\\\\"</tool_call>"}')],
        ),
        (
            HERMES,
            '<tool_call>{"never</tool_call>\n<tool_call>{"name": "g"}</tool_call>!',
            '<tool_call>{"never</tool_call>\n!',
            [("g", "{}")],
        ),
        (HERMES, "a < b <tool", "a < b <tool", []),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA, "Just words {}", "Just words {}", []),
        (LLAMA, '{"other": 1}', '{"other": 1}', []),
    ],
)
def test_calls_are_separated_from_text_in_any_chunks(
    template: str, text: str, shown: str, calls: list[tuple[str, str]], size: int
) -> None:
    parts = [text[place : place + size] for place in range(0, len(text), size)]

    assert _read(template, *parts) == (shown, calls)


def test_a_conversation_with_calls_and_their_results_reaches_the_template(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]"
        "{% endfor %};{% endfor %}"
    )
    engine = make_engine(make_checkpoint("llama", tmp_path, template=template))
    vocabulary = engine._model.checkpoint.vocabulary

    ids = vocabulary.encode(
        [
            ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", '{"a": 5}'),)),
            ChatMessage("tool", "six", tool_call_id="1"),
        ]
    )

    assert vocabulary.decode(ids) == "assistant:[f 5];tool:six;"


def test_raw_prompts_are_continued(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    engine, reference = make_engine(path), Reference(path)
    ids = reference.tokenizer.encode("a lazy dog")

    outcome = run_alone(
        engine, job("a", "", prompts=("the fox", tuple(ids)), n=2, max_tokens=8, echo=True)
    )

    assert isinstance(outcome, Completed)
    found = choices(outcome)
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    for choice, prompt in zip(found, ["the fox"] * 2 + ["a lazy dog"] * 2, strict=True):
        assert choice["text"] == prompt + reference.continue_text(prompt, 8)
    assert outcome.usage.input_tokens == len(reference.tokenizer.encode("the fox")) + len(ids)
    assert outcome.usage.output_tokens == 32
