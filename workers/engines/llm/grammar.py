"""Constrained decoding: which tokens may come next so that an answer fits a JSON schema.

Done by llguidance, which computes the allowed tokens lazily in microseconds for any vocabulary and
needs neither torch nor a compilation of the whole grammar ahead (xgrammar compiles, and requires
torch and more; outlines-core walks an automaton that large schemas make too large).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from workers.contract.jobs import ChatInput, Tool
from workers.engines.llm.tools import ToolFormat, schema_of, wanted

_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write everything: a model that may put blanks anywhere may never stop."""
_BITS: Final = torch.arange(8, dtype=torch.uint8)


class Constraint:
    """The grammar of one answer, as far as it has been said."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def allowed(self) -> torch.Tensor:
        """Tokens that may come next: bool ``(vocabulary,)``, at least one of them true."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> _BITS) & 1
        allowed = bits.flatten().bool()
        if len(allowed) < self._size:
            return torch.nn.functional.pad(allowed, (0, self._size - len(allowed)))
        return allowed[: self._size]

    def accept(self, token: int) -> None:
        """Say a token that was allowed."""
        self._matcher.consume_token(token)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to say."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Makes the constraints of one vocabulary."""

    def __init__(self, tokenizer: Any, *, size: int, end_tokens: Sequence[int]) -> None:
        self._size = size
        known = min(size, len(tokenizer))
        self._tokens = from_tokenizer(tokenizer, n_vocab=max(known, 1), eos_token=list(end_tokens))

    def constrain(self, chat: ChatInput, format: ToolFormat | None) -> Constraint:
        """The constraint that a request asks for.

        Raise ``ValueError`` with a sentence for the client if its schema cannot be followed.
        """
        tools = wanted(chat)
        if tools and format is not None:
            grammar = _grammar_of_calls(tools, format, parallel=chat.parallel_tool_calls)
        else:
            grammar = _grammar_of_answer(chat.response_format or {})
        if problem := LLMatcher.validate_grammar(grammar, self._tokens):
            raise ValueError(" ".join(problem.split())[:300])
        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:300])
        return Constraint(matcher, self._size)


def _grammar_of_answer(format: dict[str, Any]) -> str:
    schema: Any = {"type": "object"}
    if format.get("type") == "json_schema":
        schema = (format.get("json_schema") or {}).get("schema", schema)
    return _compile(schema)


def _grammar_of_calls(tools: Sequence[Tool], format: ToolFormat, *, parallel: bool) -> str:
    if format == "llama":
        return _compile(schema_of(tools, "parameters"))
    schema = {"x-guidance": _STYLE, **schema_of(tools, "arguments")}
    more = ' ("\\n" call)*' if parallel else ""
    lark = (
        f"start: call{more}\n"
        'call: "<tool_call>\\n" body "\\n</tool_call>"\n'
        f"body: %json {json.dumps(schema)}"
    )
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


def _compile(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {"x-guidance": _STYLE, **schema}
    grammar: str = LLMatcher.grammar_from_json_schema(schema)
    return grammar
