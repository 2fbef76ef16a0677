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

from workers.contract.jobs import ChatInput, Failed
from workers.contract.trials import ReferenceAnswer
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.engine import LlmEngine
from workers.engines.llm.vision.pictures import PictureInput, PicturePrompt


def write_answer(
    engine: LlmEngine, input: Mapping[str, Any], files: Sequence[bytes], *, limit: int
) -> ReferenceAnswer:
    """Answer an input greedily, with at most ``limit`` tokens."""
    checkpoint = engine.checkpoint
    prompt, pictured = _encode(checkpoint, input, files)
    limit = max(0, min(limit, _room(checkpoint) - len(prompt)))
    tokens: list[int] = []
    given, start = prompt, 0
    while len(tokens) < limit:
        token = _choose(engine, given, start, 1, pictured)[0]
        tokens.append(token)
        if token in checkpoint.vocabulary.end_tokens:
            break
        start += len(given)
        given = [token]
    return ReferenceAnswer(tuple(prompt), tuple(tokens))


def count_equal(
    engine: LlmEngine, input: Mapping[str, Any], files: Sequence[bytes], answer: ReferenceAnswer
) -> int:
    """Return how many tokens of an answer this model would choose after those before."""
    prompt, pictured = answer.prompt, None
    if files:  # what their tokens stand for is not in the answer
        _, pictured = _encode(engine.checkpoint, input, files)
    tokens = answer.tokens[: max(0, _room(engine.checkpoint) - len(prompt))]
    if not tokens:
        return 0
    chosen = _choose(engine, [*prompt, *tokens[:-1]], 0, len(tokens), pictured)
    return sum(a == b for a, b in zip(chosen, tokens, strict=True))


def _choose(
    engine: LlmEngine, ids: Sequence[int], start: int, count: int, pictured: PicturePrompt | None
) -> list[int]:
    """Compute tokens from position ``start`` on, in chunks of one block as the engine does. Return
    the likeliest token after each of the last ``count``."""
    shape, decoder = engine.checkpoint.shape, engine.decoder
    table = range(1, shape.blocks + 1)
    chosen: list[int] = []
    with torch.inference_mode():
        place = 0
        while place < len(ids):
            first = start + place
            end = min(len(ids), place + shape.block_tokens - first % shape.block_tokens)
            kept = max(0, end - max(place, len(ids) - count))
            part = None if pictured is None else _part(pictured, first, start + end)
            chunk = SequenceInput(ids[place:end], first, table, kept, pictures=part)
            logits = decoder.run(decoder.stage([], [chunk]))
            chosen += logits[:kept].argmax(dim=-1).tolist()
            place = end
    return chosen


def _part(pictured: PicturePrompt, start: int, stop: int) -> PictureInput:
    """Return tokens ``[start, stop)`` of a prompt and its answer."""
    part = pictured.part(start, stop)
    end = len(pictured.ids)
    answer = torch.arange(max(start, end), max(stop, end)) + pictured.shift
    positions = torch.cat([part.positions, answer.expand(3, -1)], dim=1)
    return PictureInput(positions, part.places, part.features)


def _room(checkpoint: Checkpoint) -> int:
    return min(checkpoint.context, checkpoint.shape.blocks * checkpoint.shape.block_tokens)


def _encode(
    checkpoint: Checkpoint, input: Mapping[str, Any], files: Sequence[bytes]
) -> tuple[Sequence[int], PicturePrompt | None]:
    """Return the tokens of an input, with its pictures encoded if it has any.

    Raise ``ValueError`` for a picture that cannot be read.
    """
    chat = msgspec.convert(input, ChatInput)
    if chat.prompts:
        return checkpoint.vocabulary.encode_prompt(chat.prompts[0]), None
    prompt = checkpoint.vocabulary.encode(chat.messages)
    reader, tower = checkpoint.pictures, checkpoint.tower
    if not files or reader is None or tower is None:
        return prompt, None
    pictures = reader.read_all(files)
    if isinstance(pictures, Failed):
        raise ValueError(pictures.message)
    pictured = reader.place(prompt, chat.messages, pictures)
    with torch.inference_mode():
        for picture in pictures:
            tower.encode(picture)
    return pictured.ids, pictured
