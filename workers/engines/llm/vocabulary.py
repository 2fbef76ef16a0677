"""A tokenizer as this engine needs it: conversations to token ids, and ids back to text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from transformers import AutoTokenizer

from workers.contract.jobs import ChatMessage, Prompt, Tool, ToolCall
from workers.engines.llm.contents import Contents
from workers.engines.llm.grammar import Grammars
from workers.engines.llm.tools import MARKERS, ToolFormat, describe, format_of

_THOUGHT: Final = "</think>"
_TOOL: Final = Tool("f", "e", {"type": "object", "properties": {}})


class Vocabulary:
    """``size`` is the model's, which may be padded beyond what the tokenizer knows."""

    def __init__(self, tokenizer: Any, *, size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        self.end_tokens = end_tokens
        self.tool_format: ToolFormat | None = format_of(str(tokenizer.chat_template or ""))
        special = {id: str(token) for id, token in _added(tokenizer).items() if token.special}
        self._hidden: frozenset[int] | None = None
        """Special tokens left out of text; None for all of them, which the tokenizer does."""
        if MARKERS & set(special.values()):
            self._hidden = frozenset(id for id, text in special.items() if text not in MARKERS)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(
            self._tokenizer,
            size=self.size,
            end_tokens=sorted(self.end_tokens),
            contents=self._contents,
        )

    def encode(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Render and tokenize a conversation, up to where the assistant is to speak.

        Raise ``ValueError`` if the model's template refuses it, as some do when roles do not
        alternate, or if it takes a token that the model has no embedding of.
        """
        turns = [self._turn(message) for message in messages]
        return self._check(self._contents.encode(self._render, turns, describe(tools)))

    @cached_property
    def _contents(self) -> Contents:
        """What counts as a control token also follows from what the template writes."""
        return Contents(self._tokenizer, self._sample())

    def _sample(self) -> str:
        """What the template writes of everything that a conversation can have."""
        call = ToolCall("c", "f", "{}")
        sampled = (
            [ChatMessage("system", "a"), ChatMessage("user", "b")],
            [
                ChatMessage("user", "b"),
                ChatMessage("assistant", "c", tool_calls=(call,)),
                ChatMessage("tool", "d", name="f", tool_call_id="c"),
            ],
        )
        found = ""
        for messages in sampled:
            # A template may refuse what its model was not trained on.
            with contextlib.suppress(ValueError):
                found += self._render([self._turn(one) for one in messages], describe([_TOOL]))
        return found

    def _render(self, turns: Any, tools: Any) -> str:
        """Raise ``ValueError`` with what the template says."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"its chat template says: {error}") from error
        return text

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """A message as chat templates want it.

        Reasoning in an answer that was sent back is parted here, as templates that know of it would
        do: once it is marked as content they do not find it.
        """
        turn = _turn(message)
        template = str(self._tokenizer.chat_template or "")
        if message.role == "assistant" and _THOUGHT in message.content and _THOUGHT in template:
            thought, _, said = message.content.rpartition(_THOUGHT)
            turn["content"] = said.lstrip("\n")
            if "reasoning_content" in template:
                thought = thought.split(_THOUGHT)[0].rstrip("\n")
                turn["reasoning_content"] = thought.split("<think>")[-1].lstrip("\n")
        return turn

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a text as it stands, with what the tokenizer puts before every text.

        It is the whole prompt, so what looks like a control token is one.
        Raise ``ValueError`` as ``encode`` does; token ids are taken as they are.
        """
        if isinstance(prompt, str):
            return self._check(self._tokenizer.encode(prompt))
        if min(prompt, default=0) < 0:
            raise ValueError(f"{min(prompt)} is no token")
        return self._check(list(prompt))

    def _check(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError("it comes to no token at all")
        if (highest := max(ids)) >= self.size:
            raise ValueError(f"it takes the token {highest}, and the model has {self.size}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens in a row, without special ones but those that mark a call."""
        if self._hidden is not None:
            ids = [id for id in ids if id not in self._hidden]
        return self._decode(ids, skip_special_tokens=self._hidden is None)

    def show(self, token: int) -> str:
        """The text of one token in the middle of others, also of a special one."""
        # Some vocabularies drop the blank before the very first word, hence the difference.
        once = self._decode([token], skip_special_tokens=False)
        return self._decode([token, token], skip_special_tokens=False)[len(once) :]

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Cleaning up would change text that was already sent, when the next token comes.
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


def _turn(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates want it; arguments that are JSON as what they say."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
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


def read_vocabulary(path: Path, model: Any) -> Vocabulary:
    """Open the tokenizer of a model. Raise ``ValueError`` if the two cannot hold a conversation."""
    tokenizer: Any = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {path} has no chat template")
    size = int(model.get_input_embeddings().num_embeddings)
    vocabulary = Vocabulary(tokenizer, size=size, end_tokens=_end_tokens(model, tokenizer))
    try:
        vocabulary.encode([ChatMessage("user", "Hello")])
    except ValueError as error:
        raise ValueError(f"{path} cannot read a conversation: {error}") from error
    return vocabulary


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
