"""Keeps what users write content: no control token comes from a message, a name or a tool.

A chat template is rendered to text, and in text a control token that a user typed looks like one
that the template wrote. So before rendering, whatever a user wrote that holds a control token, or
could complete one, is marked with a character that occurs nowhere in the conversation. A control
token in the rendered text that has no marks inside is the template's; the others are text.

The invariant: a conversation without such text is tokenized exactly as without this module.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer

Render = Callable[[Any, Any], str]
"""Renders turns and tools with the model's chat template."""

_SHAPE: Final = re.compile(r"<\|.+\|>", re.DOTALL)
_MARKS: Final = range(0xF0000, 0x10FFFE)
"""Code points for private use, of which text seldom has any."""


class Contents:
    """``tokenizer`` is a fast one of transformers; ``sample`` is text that its template made."""

    def __init__(self, tokenizer: Any, sample: str) -> None:
        self._tokenizer = tokenizer
        written = str(tokenizer.chat_template or "") + sample
        self.control = {
            id: str(token)
            for id, token in tokenizer.added_tokens_decoder.items()
            if _controls(token, written)
        }
        """Control tokens by their numbers."""
        texts = sorted(set(self.control.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._heads = {text[:size] for text in texts for size in range(1, len(text))}
        self._tails = {text[size:] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    @cached_property
    def guarded(self) -> Guarded:
        return Guarded(self._tokenizer, self.control)

    def encode(self, render: Render, turns: Any, tools: Any) -> list[int]:
        """Render and tokenize a conversation.

        Raise ``ValueError`` if no mark is left that the conversation does not contain.
        """
        mark = ""
        if any(map(self._is_suspect, _strings((turns, tools)))):
            mark = _unused(_strings((turns, tools)))

            def marked(text: str) -> str:
                return self._mark(text, mark)

            turns, tools = _map(marked, turns), _map(marked, tools)
        text = render(turns, tools)
        plain = _without(mark, text)
        own = self._pattern.findall(text)
        if not mark or len(self._pattern.findall(plain)) == len(own):
            ids: list[int] = self._tokenizer.encode(plain, add_special_tokens=False)
            if sum(id in self.control for id in ids) <= len(own):
                return ids
        pieces: list[str] = []
        end = 0
        for found in self._pattern.finditer(text):
            pieces += [_without(mark, text[end : found.start()]), self.guarded.names[found[0]]]
            end = found.end()
        return self.guarded.encode("".join([*pieces, _without(mark, text[end:])]))

    def _is_suspect(self, text: str) -> bool:
        if self._pattern.search(text):
            return True
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[-size:] in self._heads or text[:size] in self._tails for size in sizes)

    def _mark(self, text: str, mark: str) -> str:
        """Put marks into control tokens, and where one could be completed."""
        if not self._is_suspect(text):
            return text
        marked = self._pattern.sub(lambda found: "".join(mark + char for char in found[0]), text)
        sizes = range(1, min(self._longest, len(text) + 1))
        if any(text[:size] in self._tails for size in sizes) and not marked.startswith(mark):
            marked = mark + marked
        if any(text[-size:] in self._heads for size in sizes):
            marked += mark
        return marked


class Guarded:
    """A copy of a tokenizer that knows control tokens by names which cannot be guessed.

    Their numbers stay, and the text that they had is text like any other to it.
    """

    def __init__(self, tokenizer: Any, control: Mapping[int, str]) -> None:
        nonce = secrets.token_hex(16)
        self.names = {text: f"<{nonce}.{id}>" for id, text in control.items()}
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        for added in data["added_tokens"]:
            if added["id"] in control:
                added |= {"content": self.names[added["content"]], "special": True}
                added["normalized"] = False
        _rename(data["model"], self.names)
        data |= {"truncation": None, "padding": None, "post_processor": None}
        self.json = json.dumps(data)
        """In the format of Hugging Face's tokenizers."""
        self._copy = Tokenizer.from_str(self.json)

    def encode(self, text: str) -> list[int]:
        """Tokenize text whose control tokens are given by their names."""
        ids: list[int] = self._copy.encode(text, add_special_tokens=False).ids
        return ids


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename pieces of a tokenizer's model that are control tokens as well."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _makes(merge: str | list[str], names: Container[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _controls(token: Any, written: str) -> bool:
    """Whether an added token steers: a special one, or one that the template writes.

    Others are only frequent text, such as line ends or tags of HTML, and are read as they are.
    """
    text = str(token)
    if len(text) < 2 or text.isspace() or set(text) == {"▁"}:
        return False
    return bool(token.special) or text in written or bool(_SHAPE.fullmatch(text))


def _unused(texts: Iterator[str]) -> str:
    known = set().union(*map(set, texts))
    for code in _MARKS:
        if chr(code) not in known:
            return chr(code)
    raise ValueError("it holds every character for private use that there is")


def _without(mark: str, text: str) -> str:
    """Text without marks, also where a template wrote them as JSON in ASCII."""
    if not mark:
        return text
    return text.replace(mark, "").replace(json.dumps(mark)[1:-1], "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _map(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map(change, item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map(change, item) for item in value]
    return value
