"""Function calling: finds calls in generated text, and describes functions to the model.

Models write calls as text, in the form that their chat template shows. Two forms are supported:
that of Hermes (and Qwen), JSON between ``<tool_call>`` and ``</tool_call>``, and that of Llama 3,
an answer that is one JSON object. What turns out not to be a call is ordinary text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

from workers.contract.jobs import ChatInput, Tool, ToolCall
from workers.engines.llm.text import overlap

ToolFormat: TypeAlias = Literal["hermes", "llama"]

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MARKERS: Final = frozenset({BEGIN, END})
"""Special tokens kept in decoded text, because calls are found by them."""
_PYTHON_TAG: Final = "<|python_tag|>"
_STRING_OR_END: Final = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|(?P<open>\\?\Z))|{END}', re.DOTALL)


def format_of(template: str) -> ToolFormat | None:
    """Return the form of calls in a chat template, or None if it does not support tools."""
    if "tools" not in template:
        return None
    if BEGIN in template:
        return "hermes"
    if _PYTHON_TAG in template or '"parameters": ' in template:
        return "llama"
    return None


class ToolReader(Protocol):
    """Separates calls from growing text. ``push`` and ``flush`` return text that can be emitted."""

    calls: list[ToolCall]

    def push(self, text: str) -> str: ...

    def flush(self) -> str: ...


def make_reader(format: ToolFormat, chat: ChatInput, index: int) -> ToolReader:
    ids = _CallIds(f"{chat.seed}/{index}")
    return HermesReader(ids) if format == "hermes" else LlamaReader(ids)


class _CallIds:
    """Generates call ids, the same ones when a second attempt makes the same calls."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._count = 0

    def next(self) -> str:
        self._count += 1
        key = f"{self._origin}/{self._count}".encode()
        return f"call_{hashlib.blake2b(key, digest_size=12).hexdigest()}"


class HermesReader:
    def __init__(self, ids: _CallIds) -> None:
        self.calls: list[ToolCall] = []
        self._ids = ids
        self._withheld = ""

    def push(self, text: str) -> str:
        return self._parse(text, last=False)

    def flush(self) -> str:
        return self._parse("", last=True)

    def _parse(self, text: str, *, last: bool) -> str:
        self._withheld += text
        emitted = ""
        while self._withheld:
            begin = self._withheld.find(BEGIN)
            if begin < 0:
                keep = 0 if last else overlap(self._withheld, BEGIN)
                emitted += self._withheld[: len(self._withheld) - keep]
                self._withheld = self._withheld[len(self._withheld) - keep :]
                break
            emitted += self._withheld[:begin]
            self._withheld = self._withheld[begin:]
            end = _end_of_call(self._withheld)
            if end < 0 and last:  # unclosed quotes must not hide a later call
                end = self._withheld.find(END)
            if end < 0:
                if last:
                    emitted, self._withheld = emitted + self._withheld, ""
                break
            end += len(END)
            marked, self._withheld = self._withheld[:end], self._withheld[end:]
            call = _parse_call(marked[len(BEGIN) : -len(END)], self._ids)
            if call is None:
                emitted += marked
            else:
                self.calls.append(call)
        # The line break between two calls is not part of the answer.
        return emitted if not self.calls or emitted.strip() else ""


class LlamaReader:
    def __init__(self, ids: _CallIds) -> None:
        self.calls: list[ToolCall] = []
        self._ids = ids
        self._withheld = ""
        self._is_text = False

    def push(self, text: str) -> str:
        if self._is_text:
            return text
        self._withheld += text
        start = self._withheld.lstrip()
        if not start or start.startswith("{") or _PYTHON_TAG.startswith(start[:14]):
            return ""
        self._is_text = True
        return self.flush()

    def flush(self) -> str:
        text, self._withheld = self._withheld, ""
        if not self._is_text and text:
            call = _parse_call(text.strip().removeprefix(_PYTHON_TAG), self._ids)
            if call is not None:
                self.calls.append(call)
                return ""
        return text


def _parse_call(text: str, ids: _CallIds) -> ToolCall | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(ids.next(), call["name"], json.dumps(arguments, ensure_ascii=False))


def _end_of_call(text: str) -> int:
    """Return the index of the marker after a call, or -1. A marker in a JSON string is content."""
    for found in _STRING_OR_END.finditer(text):
        if found[0] == END:
            return found.start()
        if found["open"] is not None:
            return -1
    return -1


# --- For the model -------------------------------------------------------------------------------


def describe(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools to the form that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def required_tools(chat: ChatInput) -> Sequence[Tool]:
    """Return the tools of which one must be called; none if a call is optional."""
    if chat.tool_name is not None:
        return [tool for tool in chat.tools if tool.name == chat.tool_name]
    return chat.tools if chat.tool_choice == "required" else ()


def is_constrained(chat: ChatInput) -> bool:
    """Whether the answer must match a grammar."""
    return bool(required_tools(chat)) or (chat.response_format or {}).get("type", "text") != "text"
