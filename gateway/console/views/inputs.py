"""What was sent with a request, as an account's own people see it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.console.views.formats import size
from gateway.console.views.outputs import TEXT_MAX
from gateway.files.kept_inputs import KeptInput
from workers.contract.jobs import BlobRef

LONG = ("prompt", "text", "lyrics", "negative_prompt", "instructions", "transcript")


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text of an input; ``label`` is the role of a message, or the name of its field."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class ShownAttachment:
    """A file that was sent; ``position`` is its place among the attachments."""

    position: int
    kind: str
    facts: str


@dataclass(frozen=True, slots=True)
class ShownInput:
    texts: Sequence[ShownText]
    attachments: Sequence[ShownAttachment]
    value: str
    """Everything else as JSON; empty if there is nothing else."""
    cut: bool


def shown_input(kept: KeptInput) -> ShownInput:
    """Return what a page shows of an input: texts to be read, files, and the rest as JSON."""
    rest = dict(kept.input)
    texts = [*_messages(rest), *_texts(rest)]
    value = json.dumps(rest, ensure_ascii=False, indent=2) if rest else ""
    return ShownInput(
        texts=[ShownText(each.label, each.text[:TEXT_MAX]) for each in texts],
        attachments=[_attachment(*each) for each in enumerate(kept.attachments)],
        value=value[:TEXT_MAX],
        cut=any(len(text) > TEXT_MAX for text in (*(each.text for each in texts), value)),
    )


def _messages(rest: dict[str, Any]) -> Iterator[ShownText]:
    """Take the messages of a conversation that have text."""
    messages = rest.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return
    del rest["messages"]
    for each in messages:
        yield ShownText(str(each.get("role", "")), _content(each))


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message; calls of tools and other parts as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, Mapping)]
        content = "".join(part for part in parts if isinstance(part, str))
    text = content if isinstance(content, str) else ""
    return text + (json.dumps(calls, ensure_ascii=False, indent=2) if calls else "")


def _texts(rest: dict[str, Any]) -> Iterator[ShownText]:
    for name in LONG:
        if isinstance(rest.get(name), str):
            yield ShownText(name, rest.pop(name))
    inputs = rest.get("input")
    if isinstance(inputs, str):
        yield ShownText("input", rest.pop("input"))
    elif isinstance(inputs, list) and inputs and all(isinstance(each, str) for each in inputs):
        del rest["input"]
        yield from (ShownText(f"input {place}", each) for place, each in enumerate(inputs, 1))


def _attachment(position: int, blob: BlobRef) -> ShownAttachment:
    return ShownAttachment(position, blob.content_type.partition("/")[0], size(blob.bytes))
