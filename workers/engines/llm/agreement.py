"""Compares the choices of a model at two precisions: greedy answers of one, checked by the other.

Each token is compared after the same tokens, those of the reference, so that one difference does
not count for all that follow. Writes to the engine's cache without its scheduler, so the engine
cannot serve afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from workers.contract.jobs import ChatInput
from workers.contract.trials import ReferenceAnswer
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.engine import LlmEngine


def write_answer(engine: LlmEngine, input: Mapping[str, Any], limit: int) -> ReferenceAnswer:
    """Answer an input greedily, with at most ``limit`` tokens."""
    checkpoint = engine.checkpoint
    prompt = _encode(checkpoint, input)
    limit = max(0, min(limit, _room(checkpoint) - len(prompt)))
    tokens: list[int] = []
    given, start = prompt, 0
    while len(tokens) < limit:
        token = _choose(engine, given, start, 1)[0]
        tokens.append(token)
        if token in checkpoint.vocabulary.end_tokens:
            break
        start += len(given)
        given = [token]
    return ReferenceAnswer(tuple(prompt), tuple(tokens))


def count_equal(engine: LlmEngine, answer: ReferenceAnswer) -> int:
    """Return how many tokens of an answer this model would choose after those before."""
    prompt = answer.prompt
    tokens = answer.tokens[: max(0, _room(engine.checkpoint) - len(prompt))]
    if not tokens:
        return 0
    chosen = _choose(engine, [*prompt, *tokens[:-1]], 0, len(tokens))
    return sum(a == b for a, b in zip(chosen, tokens, strict=True))


def _choose(engine: LlmEngine, ids: Sequence[int], start: int, count: int) -> list[int]:
    """Compute tokens from position ``start`` on, in chunks of one block as the engine does. Return
    the likeliest token after each of the last ``count``."""
    shape, decoder = engine.checkpoint.shape, engine.decoder
    table = range(1, shape.blocks + 1)
    chosen: list[int] = []
    with torch.inference_mode():
        place = 0
        while place < len(ids):
            end = min(len(ids), place + shape.block_tokens - (start + place) % shape.block_tokens)
            kept = max(0, end - max(place, len(ids) - count))
            chunk = SequenceInput(ids[place:end], start + place, table, kept)
            logits = decoder.run(decoder.stage([], [chunk]))
            chosen += logits[:kept].argmax(dim=-1).tolist()
            place = end
    return chosen


def _room(checkpoint: Checkpoint) -> int:
    return min(checkpoint.context, checkpoint.shape.blocks * checkpoint.shape.block_tokens)


def _encode(checkpoint: Checkpoint, input: Mapping[str, Any]) -> list[int]:
    chat = msgspec.convert(input, ChatInput)
    if any(message.parts for message in chat.messages):
        raise ValueError("a conversation with pictures cannot be compared")
    if chat.prompts:
        return checkpoint.vocabulary.encode_prompt(chat.prompts[0])
    return checkpoint.vocabulary.encode(chat.messages)
