"""The limit on log probabilities, the only part of a text output that a client can make large.

A worker keeps the whole output in memory until it ends.
"""

from __future__ import annotations

from typing import Final

from gateway.tasks.prepared import over
from workers.contract.jobs import ChatInput

LOGPROB_BYTES: Final = 48
"""Upper bound on the size of one log probability in an output, in bytes."""
LOGPROBS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of all log probabilities of one output, in bytes."""


def refuse_many_logprobs(chat: ChatInput, prefix: str) -> None:
    """Raise ``InvalidRequest`` if the requested log probabilities can exceed the limit, with the
    number of tokens that would be accepted."""
    each = chat.choices * (1 + chat.top_logprobs) * LOGPROB_BYTES
    if each * chat.max_tokens > LOGPROBS_BYTES_MAX:
        raise over(
            f"{prefix}max_tokens",
            chat.max_tokens,
            f"with {chat.choices} choices and {chat.top_logprobs} top log probabilities of each "
            f"token at most {LOGPROBS_BYTES_MAX // each} tokens are accepted",
        )
