"""Compares the choices of a model at two precisions: greedy answers of one, checked by the other.

Each token is compared after the same tokens, those of the reference, so that one difference does
not count for all that follow. Uses the library's own attention instead of the engine's cache, so
the engine cannot serve afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from workers.contract.jobs import ChatInput
from workers.contract.trials import ReferenceAnswer
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.engine import LlmEngine


def write_answer(engine: LlmEngine, input: Mapping[str, Any], limit: int) -> ReferenceAnswer:
    """Answer an input greedily, with at most ``limit`` tokens."""
    checkpoint = _detached(engine)
    prompt = _encode(checkpoint, input)
    limit = max(0, min(limit, checkpoint.context - len(prompt)))
    given, past, tokens = prompt, None, list[int]()
    with torch.inference_mode():
        while len(tokens) < limit:
            ids = torch.tensor([given], device=checkpoint.device)
            answer = checkpoint.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = answer.past_key_values
            token = int(answer.logits[0, -1].argmax())
            tokens.append(token)
            if token in checkpoint.vocabulary.end_tokens:
                break
            given = [token]
    return ReferenceAnswer(tuple(prompt), tuple(tokens))


def count_equal(engine: LlmEngine, answer: ReferenceAnswer) -> int:
    """Return how many tokens of an answer this model would choose after those before."""
    checkpoint, tokens = _detached(engine), list(answer.tokens)
    if not tokens:
        return 0
    with torch.inference_mode():
        ids = torch.tensor([[*answer.prompt, *tokens]], device=checkpoint.device)
        logits = checkpoint.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        chosen = logits.argmax(dim=-1).tolist()
    return sum(a == b for a, b in zip(chosen, tokens, strict=True))


def _encode(checkpoint: Checkpoint, input: Mapping[str, Any]) -> list[int]:
    chat = msgspec.convert(input, ChatInput)
    if chat.prompts:
        return checkpoint.vocabulary.encode_prompt(chat.prompts[0])
    return checkpoint.vocabulary.encode(chat.messages)


def _detached(engine: LlmEngine) -> Checkpoint:
    checkpoint = engine.checkpoint
    checkpoint.model.set_attn_implementation("sdpa")
    return checkpoint
