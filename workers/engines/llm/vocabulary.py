"""A tokenizer as this engine needs it: conversations to token ids, and ids back to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from workers.contract.jobs import ChatMessage, Prompt, Tool
from workers.engines.llm.grammar import Grammars
from workers.engines.llm.tools import ToolFormat, describe, format_of


class Vocabulary:
    """``size`` is the model's, which may be padded beyond what the tokenizer knows."""

    def __init__(self, tokenizer: Any, *, size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        self.end_tokens = end_tokens
        self.tool_format: ToolFormat | None = format_of(str(tokenizer.chat_template or ""))

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self._tokenizer, size=self.size, end_tokens=sorted(self.end_tokens))

    def encode(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Render and tokenize a conversation, up to where the assistant is to speak.

        Raise ``ValueError`` if the model's template refuses it, as some do when roles do not
        alternate, or if it takes a token that the model has no embedding of.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [_turn(message) for message in messages],
                tools=describe(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise ValueError(f"its chat template says: {error}") from error
        return self._check(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a text as it stands, with what the tokenizer puts before every text.

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
        """The text of tokens in a row, without the special ones."""
        return self._decode(ids, skip_special_tokens=True)

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
