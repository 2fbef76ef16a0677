"""Constrained decoding: which tokens may come next so that an answer fits a JSON schema.

Uses llguidance, which computes the allowed tokens lazily, in microseconds for any vocabulary, and
needs neither torch nor compiling the whole grammar ahead. (xgrammar compiles, and requires torch
and more; outlines-core builds an automaton, which large schemas make too large.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from workers.contract.jobs import ChatInput, Tool
from workers.engines.llm.contents import Contents
from workers.engines.llm.tools import BEGIN, END, ToolFormat, required_tools

log = logging.getLogger(__name__)

_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One canonical format: a model that may put whitespace anywhere might never stop."""


class GrammarError(Exception):
    """The grammar failed; text generated under it is not an answer."""


class Constraint:
    """The grammar of one answer, and the state of matching it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def packed(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the tokens that may come next, eight to a byte from the lowest bit on; at least
        one is set. Those of a padded embedding may be missing.

        Raise ``GrammarError`` if the grammar cannot be continued.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()  # after an error the mask allows the end token, as if all were complete
        return packed

    def accept(self, token: int) -> None:
        """Advance by an allowed token. Raise ``GrammarError`` if it does not match."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and no token can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        """Raise ``GrammarError`` after an error, or a stop before the answer was complete."""
        matcher = self._matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            # The matcher's own message quotes the answer, which must not be logged.
            raise GrammarError(f"the grammar stopped early ({matcher.stop_reason()})")


class Grammars:
    """Creates constraints for one vocabulary."""

    def __init__(self, tokenizer: Any, *, end_tokens: Sequence[int], contents: Contents) -> None:
        self._control = {text: id for id, text in contents.control.items()}
        # Control tokens have unpredictable names here. Otherwise their text in a schema would be
        # forced as the token, which llguidance then refuses.
        self._tokens = LLTokenizer(
            contents.guarded.json,
            n_vocab=len(tokenizer),
            eos_token=list(end_tokens),
        )

    def constrain(
        self, chat: ChatInput, format: ToolFormat | None, *, request_id: str = ""
    ) -> Constraint:
        """Create the constraint of a request.

        Raise ``ValueError`` with a message for the client if its schema is not supported.
        """
        tools = required_tools(chat)
        if tools and format is not None:
            grammar = self._grammar_of_calls(tools, format, parallel=chat.parallel_tool_calls)
        else:
            grammar = _grammar_of_answer(chat.response_format or {})
        refused, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if refused:
            raise ValueError(" ".join(messages[0].split())[:300])
        for message in messages:
            warning = {"request_id": request_id, "warning": _first_line(message)}
            log.warning("grammar is only partly enforced", extra=warning)
        # The matcher would print its warnings to standard error, without time or request id.
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:300])
        return Constraint(matcher)

    def _grammar_of_calls(
        self, tools: Sequence[Tool], format: ToolFormat, *, parallel: bool
    ) -> str:
        """Write a rule for each function, so that its schema keeps its own root for ``$ref``."""
        rules = []
        field = "parameters" if format == "llama" else "arguments"
        for number, tool in enumerate(tools):
            head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{field}": ')
            schema = json.dumps({"x-guidance": _STYLE, **_arguments_of(tool)})
            rules += [
                f'call{number}: {head} arguments{number} "}}"',
                f"arguments{number}: %json {schema}",
            ]
        body = " | ".join(f"call{number}" for number in range(len(tools)))
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
        """Write a marker in Lark: as its token if the vocabulary has one, otherwise as text."""
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
    """Return the schema of a function's arguments, which defaults to an object.

    Raise ``ValueError`` if it does not allow an object.
    """
    if not tool.parameters:
        return {"type": "object", "additionalProperties": False}
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the parameters of {tool.name} are of type {kind!r}, not 'object'")
    return {**tool.parameters, "type": "object"}


def _first_line(message: str) -> str:
    """Return llguidance's message without the state dump after it, which contains the answer."""
    return message.strip().partition("\n")[0][:200]
