"""The bound on log probabilities, the only part of a text output that a client can make large.

A worker has all of an output in memory until it ends.
"""

from __future__ import annotations

from typing import Final

from gateway.tasks.prepared import over
from workers.contract.jobs import ChatInput

LOGPROB_BYTES: Final = 48
"""Bound on what one log-probability takes in an output: token texts are short, names few."""
LOGPROBS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size of all log probabilities of one output, which a worker has in memory until it ends."""


def refuse_many_logprobs(chat: ChatInput, prefix: str) -> None:
    """Raise ``InvalidRequest`` with the number of tokens that would be accepted."""
    if not chat.logprobs:
        return
    each = chat.choices * (1 + chat.top_logprobs) * LOGPROB_BYTES
    if each * chat.max_tokens > LOGPROBS_BYTES_MAX:
        raise over(
            f"{prefix}max_tokens",
            chat.max_tokens,
            f"with {chat.choices} choices and {chat.top_logprobs} top log probabilities of each "
            f"token at most {LOGPROBS_BYTES_MAX // each} tokens are accepted",
        )
