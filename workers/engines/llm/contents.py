"""Tokenizes conversations so that no control token comes from a message, a name or a tool.

A chat template is rendered to text, in which a control token that a user typed looks like one of
the template. So before rendering, every user string that contains a control token, or could
complete one, is marked with a character that occurs nowhere in the conversation. A control token in
the rendered text without marks inside it is the template's; all others are text.

The invariant: a conversation without such strings is tokenized exactly as without this module.
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
"""Candidate marks: private-use code points, which text rarely contains."""


class Contents:
    """``tokenizer``: a fast one of transformers. ``sample``: text rendered by its template."""

    def __init__(self, tokenizer: Any, sample: str) -> None:
        self._tokenizer = tokenizer
        template_text = str(tokenizer.chat_template or "") + sample
        self.control = {
            id: str(token)
            for id, token in tokenizer.added_tokens_decoder.items()
            if _is_control(token, template_text)
        }
        """Text of each control token, by token id."""
        texts = sorted(set(self.control.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._heads = {text[:size] for text in texts for size in range(1, len(text))}
        self._tails = {text[size:] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    @cached_property
    def guarded(self) -> GuardedTokenizer:
        return GuardedTokenizer(self._tokenizer, self.control)

    def encode(self, render: Render, turns: Any, tools: Any) -> list[int]:
        """Render and tokenize a conversation.

        Raise ``ValueError`` if the conversation contains every candidate mark.
        """
        mark = ""
        if any(map(self._is_suspect, _strings((turns, tools)))):
            mark = _find_mark(_strings((turns, tools)))

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
        """Insert marks into control tokens, and at ends that could complete one."""
        if not self._is_suspect(text):
            return text
        marked = self._pattern.sub(lambda found: "".join(mark + char for char in found[0]), text)
        sizes = range(1, min(self._longest, len(text) + 1))
        if any(text[:size] in self._tails for size in sizes) and not marked.startswith(mark):
            marked = mark + marked
        if any(text[-size:] in self._heads for size in sizes):
            marked += mark
        return marked


class GuardedTokenizer:
    """A copy of a tokenizer in which control tokens have unpredictable names.

    Their ids stay the same, and their original text is tokenized like any other text.
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
        """The copy in the JSON format of Hugging Face's tokenizers."""
        self._copy = Tokenizer.from_str(self.json)

    def encode(self, text: str) -> list[int]:
        """Tokenize text in which control tokens are written by their names."""
        ids: list[int] = self._copy.encode(text, add_special_tokens=False).ids
        return ids


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename entries of a tokenizer's vocabulary that are also control tokens."""
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


def _is_control(token: Any, template_text: str) -> bool:
    """Whether an added token is a control token: a special one, or one that the template writes.

    Others are only frequent text, such as line ends or HTML tags.
    """
    text = str(token)
    if len(text) < 2 or text.isspace() or set(text) == {"▁"}:
        return False
    return bool(token.special) or text in template_text or bool(_SHAPE.fullmatch(text))


def _find_mark(texts: Iterator[str]) -> str:
    known = set().union(*map(set, texts))
    for code in _MARKS:
        if chr(code) not in known:
            return chr(code)
    raise ValueError("it contains every private use character")


def _without(mark: str, text: str) -> str:
    """Remove marks from text, including those that a template wrote as ASCII JSON."""
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
