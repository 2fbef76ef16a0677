"""Constrained decoding: which tokens may come next so that an answer fits a JSON schema.

Done by llguidance, which computes the allowed tokens lazily in microseconds for any vocabulary and
needs neither torch nor a compilation of the whole grammar ahead (xgrammar compiles, and requires
torch and more; outlines-core walks an automaton that large schemas make too large).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from llguidance import LLMatcher, LLTokenizer

from workers.contract.jobs import ChatInput, Tool
from workers.engines.llm.contents import Contents
from workers.engines.llm.tools import BEGIN, END, ToolFormat, wanted

log = logging.getLogger(__name__)

_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write everything: a model that may put blanks anywhere may never stop."""
_BITS: Final = torch.arange(8, dtype=torch.uint8)


class GrammarError(Exception):
    """The grammar is in error: nothing written under it counts as an answer."""


class Constraint:
    """The grammar of one answer, with its position in it."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def allowed(self) -> torch.Tensor:
        """Tokens that may come next: bool ``(vocabulary,)``, at least one of them true.

        Raise ``GrammarError`` if the grammar cannot be followed any further.
        """
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()  # after an error the mask allows the end, which would pass for an answer
        bits = (packed[:, None] >> _BITS) & 1
        allowed = bits.flatten().bool()
        if len(allowed) < self._size:
            return torch.nn.functional.pad(allowed, (0, self._size - len(allowed)))
        return allowed[: self._size]

    def accept(self, token: int) -> None:
        """Advance by a token that was allowed. Raise ``GrammarError`` if it does not fit."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        """Raise ``GrammarError`` after an error, and if it stopped before it was satisfied."""
        matcher = self._matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            # Its own message quotes the answer, which does not belong in a log.
            raise GrammarError(f"its grammar stopped early ({matcher.stop_reason()})")


class Grammars:
    """Makes the constraints of one vocabulary."""

    def __init__(self, tokenizer: Any, *, size: int, end_tokens: Sequence[int], contents: Contents):
        self._size = size
        self._control = {text: id for id, text in contents.control.items()}
        # Under names that cannot be guessed, or their text in a schema would be forced as the
        # token, which llguidance then refuses.
        self._tokens = LLTokenizer(
            contents.guarded.json,
            n_vocab=len(tokenizer),
            eos_token=list(end_tokens),
        )

    def constrain(
        self, chat: ChatInput, format: ToolFormat | None, *, request_id: str = ""
    ) -> Constraint:
        """The constraint that a request asks for.

        Raise ``ValueError`` with a sentence for the client if its schema cannot be followed.
        """
        tools = wanted(chat)
        if tools and format is not None:
            grammar = self._grammar_of_calls(tools, format, parallel=chat.parallel_tool_calls)
        else:
            grammar = _grammar_of_answer(chat.response_format or {})
        refused, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if refused:
            raise ValueError(" ".join(messages[0].split())[:300])
        for message in messages:
            warning = {"request_id": request_id, "warning": _first_line(message)}
            log.warning("grammar is not followed to the letter", extra=warning)
        # Its own warnings would go to the standard error, without time or request.
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:300])
        return Constraint(matcher, self._size)

    def _grammar_of_calls(
        self, tools: Sequence[Tool], format: ToolFormat, *, parallel: bool
    ) -> str:
        """A rule for each function, so that its schema keeps its own root for ``$ref``."""
        rules = []
        field = "parameters" if format == "llama" else "arguments"
        for place, tool in enumerate(tools):
            head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{field}": ')
            schema = json.dumps({"x-guidance": _STYLE, **_arguments_of(tool)})
            rules += [
                f'call{place}: {head} arguments{place} "}}"',
                f"arguments{place}: %json {schema}",
            ]
        body = " | ".join(f"call{place}" for place in range(len(tools)))
        if format == "llama":
            begin = [f"start: {body}"]
        else:
            more = ' ("\\n" call)*' if parallel else ""
            begin = [
                f"start: call{more}",
                f'call: {self._marker(BEGIN)} "\\n" ({body}) "\\n" {self._marker(END)}',
            ]
        grammar: str = LLMatcher.grammar_from_lark("\n".join(begin + rules))
        return grammar

    def _marker(self, text: str) -> str:
        """A marker in Lark: as its token where the vocabulary has one, otherwise as its text."""
        id = self._control.get(text)
        return json.dumps(text) if id is None else f"<[{id}]>"


def _grammar_of_answer(format: dict[str, Any]) -> str:
    schema: Any = {"type": "object"}
    if format.get("type") == "json_schema":
        schema = (format.get("json_schema") or {}).get("schema", schema)
    if isinstance(schema, dict):
        schema = {"x-guidance": _STYLE, **schema}
    grammar: str = LLMatcher.grammar_from_json_schema(schema)
    return grammar


def _arguments_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object even if it does not say so.

    Raise ``ValueError`` if they can be none.
    """
    if not tool.parameters:
        return {"type": "object", "additionalProperties": False}
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the parameters of {tool.name} are of type {kind!r}, not 'object'")
    return {**tool.parameters, "type": "object"}


def _first_line(message: str) -> str:
    """What llguidance says before it dumps its state, which holds what was written."""
    return message.strip().partition("\n")[0][:200]
