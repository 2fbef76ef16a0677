"""The tokenizer of a language model: conversations to token ids, and ids back to text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError

from workers.contract.jobs import ChatMessage, Prompt, Tool, ToolCall
from workers.engines.checkpoints import read_tokenizer
from workers.engines.llm.contents import Contents
from workers.engines.llm.grammar import Grammars
from workers.engines.llm.text import ThoughtReader, marks_of
from workers.engines.llm.tools import MARKERS, ToolFormat, describe, format_of

_THOUGHT: Final = "</think>"
_TAIL_TOKENS: Final = 16
"""Enough tokens of a prompt to hold a mark and the line breaks after it."""
_TOOL: Final = Tool("f", "e", {"type": "object", "properties": {}})


class Vocabulary:
    """``size`` is that of the model's embedding, which may be padded beyond the tokenizer's."""

    def __init__(self, tokenizer: Any, *, size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        self.end_tokens = end_tokens
        self.has_template = tokenizer.chat_template is not None
        self.tool_format: ToolFormat | None = format_of(str(tokenizer.chat_template or ""))
        special = {id: str(token) for id, token in _added(tokenizer).items() if token.special}
        self._hidden: frozenset[int] | None = None
        """Special tokens omitted from text; None for all, which the tokenizer omits itself."""
        added = {str(token) for token in _added(tokenizer).values()}
        self.marks = marks_of(str(tokenizer.chat_template or ""), added)
        """What the model writes around its thoughts."""
        shown = MARKERS | set(self.marks or ())
        if shown & set(special.values()):
            self._hidden = frozenset(id for id, text in special.items() if text not in shown)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(
            self._tokenizer,
            end_tokens=sorted(self.end_tokens),
            contents=self._contents,
        )

    def encode(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Render and tokenize a conversation, up to the start of the assistant's answer.

        Raise ``ValueError`` if the model has no template, if its template refuses the conversation,
        as some do if roles do not alternate, or if it has a token without an embedding.
        """
        if not self.has_template:
            raise ValueError("it has no chat template, and only continues texts (completions)")
        turns = [self._turn(message) for message in messages]
        return self._check(self._contents.encode(self._render, turns, describe(tools)))

    @cached_property
    def _contents(self) -> Contents:
        # Which tokens are control tokens also depends on what the template writes.
        return Contents(self._tokenizer, self._sample())

    def _sample(self) -> str:
        """Render conversations that contain everything a conversation can have."""
        call = ToolCall("c", "f", "{}")
        conversations = (
            [ChatMessage("system", "a"), ChatMessage("user", "b")],
            [
                ChatMessage("user", "b"),
                ChatMessage("assistant", "c", tool_calls=(call,)),
                ChatMessage("tool", "d", name="f", tool_call_id="c"),
            ],
        )
        found = ""
        for messages in conversations:
            # Templates refuse what their model was not trained on.
            with contextlib.suppress(ValueError):
                found += self._render([self._turn(one) for one in messages], describe([_TOOL]))
        return found

    def count_around(self, mark: int) -> int:
        """Return how many tokens the template writes for a picture beside the token ``mark``.

        Raise ``ValueError`` if it does not write that one.
        """
        one, two = (self.encode([ChatMessage("user", "", parts=parts)]) for parts in ((0,), (0, 1)))
        if (one.count(mark), two.count(mark)) != (1, 2):
            raise ValueError(
                f"its chat template does not write the token {self.token_text(mark)!r} for a "
                "picture in a message"
            )
        return len(two) - len(one) - 1

    def _render(self, turns: Any, tools: Any) -> str:
        """Raise ``ValueError`` with the template's message."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"its chat template failed: {error}") from error
        return text

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """Convert a message to the form that chat templates expect.

        Reasoning in an assistant message is separated here, as templates that support it would do:
        once marked as content (``contents``), templates no longer find it.
        """
        turn = _turn(message)
        template = str(self._tokenizer.chat_template or "")
        if message.role == "assistant" and _THOUGHT in message.content and _THOUGHT in template:
            thought, _, answer = message.content.rpartition(_THOUGHT)
            turn["content"] = answer.lstrip("\n")
            if "reasoning_content" in template:
                thought = thought.split(_THOUGHT)[0].rstrip("\n")
                turn["reasoning_content"] = thought.split("<think>")[-1].lstrip("\n")
        return turn

    def thoughts(self, prompt: Sequence[int]) -> ThoughtReader | None:
        """Return the reader of thoughts in the answer to a conversation, if this model has any."""
        if self.marks is None:
            return None
        # Some templates begin the thoughts themselves.
        begin, end = self.marks
        tail = self._decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        closed = tail.endswith(end)
        return None if closed else ThoughtReader(self.marks, inside=tail.endswith(begin))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a raw prompt, with the tokens that the tokenizer puts before every text.

        The client writes the whole prompt, so control tokens in it are control tokens. Token ids
        are passed through. Raise ``ValueError`` as ``encode`` does.
        """
        if isinstance(prompt, str):
            return self._check(self._tokenizer.encode(prompt))
        if min(prompt, default=0) < 0:
            raise ValueError(f"{min(prompt)} is not a valid token")
        return self._check(list(prompt))

    def _check(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError("it has no tokens")
        if (highest := max(ids)) >= self.size:
            raise ValueError(f"it contains token {highest}; tokens are 0 to {self.size - 1}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of consecutive tokens, without special tokens other than markers."""
        if self._hidden is not None:
            ids = [id for id in ids if id not in self._hidden]
        return self._decode(ids, skip_special_tokens=self._hidden is None)

    def token_text(self, token: int) -> str:
        """Return the text of one token between others; special tokens included."""
        # Some vocabularies drop the space before the very first word, hence the difference.
        once = self._decode([token], skip_special_tokens=False)
        return self._decode([token, token], skip_special_tokens=False)[len(once) :]

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Clean-up could change text already sent when the next token arrives.
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect, with parsed JSON arguments."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        turn["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _added(tokenizer: Any) -> dict[int, Any]:
    found: dict[int, Any] = tokenizer.added_tokens_decoder
    return found


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_vocabulary(path: Path, *, size: int, end_tokens: Any) -> Vocabulary:
    """Load a tokenizer. Raise ``ValueError`` if its template renders no conversation.

    ``size`` and ``end_tokens`` are those of the model, the latter a token, several or None.
    """
    tokenizer = read_tokenizer(path)
    ends = _end_tokens(end_tokens, tokenizer.eos_token_id)
    vocabulary = Vocabulary(tokenizer, size=size, end_tokens=ends)
    if not vocabulary.has_template:
        return vocabulary
    try:
        vocabulary.encode([ChatMessage("user", "Hello")])
    except ValueError as error:
        raise ValueError(f"{path} cannot render a conversation: {error}") from error
    return vocabulary


def _end_tokens(*given: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in given:
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
