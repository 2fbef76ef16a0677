"""Functions that a model may ask for: finding the calls in what it says, forcing it to make one.

Models write calls as text, each family in its own form, which its chat template shows. Two forms
are read: Hermes's (also Qwen's), JSON between ``<tool_call>`` and ``</tool_call>``, and Llama 3's,
an answer that is one JSON object. What is not a call after all is text like any other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

from workers.contract.jobs import ChatInput, Tool, ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama"]

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MARKERS: Final = frozenset({BEGIN, END})
"""Calls are found by these in the text, so they stay in it."""
_PYTHON_TAG: Final = "<|python_tag|>"
_STRING_OR_END: Final = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|(?P<open>\\?\Z))|{END}', re.DOTALL)


def format_of(template: str) -> ToolFormat | None:
    """In which form a chat template has its model write calls; None if it knows no tools."""
    if "tools" not in template:
        return None
    if BEGIN in template:
        return "hermes"
    if _PYTHON_TAG in template or '"parameters": ' in template:
        return "llama"
    return None


class ToolReader(Protocol):
    """Parts text from calls as it grows. ``push`` and ``flush`` give what may be shown now."""

    calls: list[ToolCall]

    def push(self, text: str) -> str: ...

    def flush(self) -> str: ...


def make_reader(format: ToolFormat, chat: ChatInput, index: int) -> ToolReader:
    names = _Names(f"{chat.seed}/{index}")
    return HermesReader(names) if format == "hermes" else LlamaReader(names)


class _Names:
    """Names for calls, the same when a second attempt makes the same calls."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._made = 0

    def next(self) -> str:
        self._made += 1
        said = f"{self._origin}/{self._made}".encode()
        return f"call_{hashlib.blake2b(said, digest_size=12).hexdigest()}"


class HermesReader:
    def __init__(self, names: _Names) -> None:
        self.calls: list[ToolCall] = []
        self._names = names
        self._held = ""

    def push(self, text: str) -> str:
        return self._read(text, last=False)

    def flush(self) -> str:
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> str:
        self._held += text
        shown = ""
        while self._held:
            begin = self._held.find(BEGIN)
            if begin < 0:
                keep = 0 if last else _overlap(self._held, BEGIN)
                shown += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            shown += self._held[:begin]
            self._held = self._held[begin:]
            end = _end_of_call(self._held)
            if end < 0 and last:  # quotes that never close hide no later call
                end = self._held.find(END)
            if end < 0:
                if last:
                    shown, self._held = shown + self._held, ""
                break
            whole, self._held = self._held[: end + len(END)], self._held[end + len(END) :]
            call = _read_call(whole[len(BEGIN) : -len(END)], self._names)
            if call is None:
                shown += whole
            else:
                self.calls.append(call)
        # Between two calls stands a line end that is not meant for anybody.
        return shown if not self.calls or shown.strip() else ""


class LlamaReader:
    def __init__(self, names: _Names) -> None:
        self.calls: list[ToolCall] = []
        self._names = names
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> str:
        if self._is_text:
            return text
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or _PYTHON_TAG.startswith(begun[:14]):
            return ""
        self._is_text = True
        return self.flush()

    def flush(self) -> str:
        held, self._held = self._held, ""
        if not self._is_text and held:
            call = _read_call(held.strip().removeprefix(_PYTHON_TAG), self._names)
            if call is not None:
                self.calls.append(call)
                return ""
        return held


def _read_call(text: str, names: _Names) -> ToolCall | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(names.next(), said["name"], json.dumps(arguments, ensure_ascii=False))


def _end_of_call(text: str) -> int:
    """Where the marker after a call begins, or -1; one inside a JSON string is content."""
    for found in _STRING_OR_END.finditer(text):
        if found[0] == END:
            return found.start()
        if found["open"] is not None:
            return -1
    return -1


def _overlap(text: str, marker: str) -> int:
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


# --- For the model -------------------------------------------------------------------------------


def describe(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates want them."""
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


def wanted(chat: ChatInput) -> Sequence[Tool]:
    """The tools of which one must be called; none if the model may choose."""
    if chat.tool_name is not None:
        return [tool for tool in chat.tools if tool.name == chat.tool_name]
    return chat.tools if chat.tool_choice == "required" else ()


def is_constrained(chat: ChatInput) -> bool:
    """Whether an answer may be only of a certain form."""
    return bool(wanted(chat)) or (chat.response_format or {}).get("type", "text") != "text"
