"""Decides how many prompt tokens a step can prefill while other requests decode.

Pure: measured times come in, a number of tokens goes out. A step that prefills keeps all decoding
requests waiting, so it ends after ``STEP_US`` as far as measured, or takes half as long again as
decoding alone if that is more. The time of a token is learned from the latest steps, so it follows
the device, its load and the length of the prompt. At least one block is prefilled in each step.
While nothing decodes, steps are as large as the scheduler allows.

Chunks of a prompt are the same whatever a step contains, so pacing never changes an answer.
"""

from __future__ import annotations

from typing import Final

STEP_US: Final = 50_000
"""Longest step that readers of a stream do not notice: twenty steps per second."""
_LATEST: Final = 0.25
"""Share of the latest step in an average."""
_OUTLIER: Final = 4.0
"""Most by which one step, in which the machine was busy otherwise, can exceed the average."""


class PrefillPacing:
    """Averages are of microseconds; None until the first step of their kind."""

    def __init__(self, *, block_tokens: int, step_us: int = STEP_US) -> None:
        self._block_tokens = block_tokens
        self._step_us = step_us
        self._decode_us: float | None = None
        """Time of a step that only decodes."""
        self._token_us: float | None = None
        """Time that each prompt token adds to a step."""

    @property
    def tokens_max(self) -> int:
        """Maximum prompt tokens of a step in which other requests decode."""
        if not self._token_us:
            return self._block_tokens
        decode_us = self._decode_us or 0.0
        left_us = max(self._step_us - decode_us, decode_us / 2)
        blocks = int(left_us / self._token_us) // self._block_tokens
        return max(blocks, 1) * self._block_tokens

    def record(self, *, decodes: int, prefill_tokens: int, spent_us: float) -> None:
        """Learn from a step that decoded for ``decodes`` sequences."""
        if not prefill_tokens:
            if decodes:
                self._decode_us = _average(self._decode_us, spent_us)
            return
        decode_us = (self._decode_us or 0.0) if decodes else 0.0
        token_us = max(spent_us - decode_us, 0.0) / prefill_tokens
        self._token_us = _average(self._token_us, token_us)


def _average(known: float | None, latest: float) -> float:
    if known is None:
        return latest
    return known + _LATEST * (min(latest, _OUTLIER * known) - known)
