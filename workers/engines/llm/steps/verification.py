"""Samples the tokens of a step, and compares them with draft tokens.

Sampling is begun, and read when the next step has been launched: see ``launch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workers.engines.llm.grammar import GrammarError
from workers.engines.llm.request import ChoiceState
from workers.engines.llm.sampling import Draw, Drawing, SampledToken


@dataclass(slots=True)
class Verification:
    """The logits of a choice: row ``row``, and one more for each of its draft tokens.

    All rows are sampled in one batch, as if the draft tokens before them were accepted. Only where
    a token changes the logits of the next one outside the model (penalties, grammars) is each row
    sampled after the one before.
    """

    choice: ChoiceState
    row: int
    drafts: Sequence[int] = ()
    sampled: list[SampledToken] = field(default_factory=list)
    """The next token, and further ones for as long as the draft tokens are confirmed."""
    error: str | None = None
    """Why no token could be sampled. Fails only its own request."""
    _open: bool = True

    @property
    def result(self) -> list[SampledToken] | str:
        return self.sampled if self.error is None else self.error

    def draws(self) -> list[Draw]:
        if not self._open:
            return []
        sampler, done = self.choice.sampler, len(self.sampled)
        last = done if sampler.is_stateful else len(self.drafts)
        return [
            Draw(sampler, self.row + index, offset=index - done) for index in range(done, last + 1)
        ]

    def accept(self, tokens: Sequence[SampledToken | str]) -> None:
        """Take the tokens of the draws, up to the first that is not the draft token."""
        for token in tokens:
            if isinstance(token, str):
                self.error, self._open = token, False
                return
            try:
                accepted = self.choice.sampler.accept(token)
            except GrammarError as error:
                self.error = f"The answer could not be constrained to its schema: {error}."
                self._open = False
                return
            index = len(self.sampled)
            self.sampled.append(accepted)
            is_draft = index < len(self.drafts) and self.drafts[index] == token.token
            self._open = is_draft and not self.choice.ends_at(accepted)
            if not self._open:
                return


class Verifying:
    """Sampling from the logits of a step, which has begun. If memory runs out at the beginning,
    nothing has changed."""

    def __init__(self, logits: torch.Tensor, verifications: Sequence[Verification]) -> None:
        self._logits = logits
        self._verifications = verifications
        self._asked = [one.draws() for one in verifications]
        self._drawing = self._begin()

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of all draws ``(draws,)``, on the device. Without draft tokens, a draw for
        each verification."""
        return self._drawing.tokens

    def finish(self) -> bool:
        """Read the tokens. Return whether they are those that ``tokens`` had."""
        is_same = self._accept()
        while any(asked := [one.draws() for one in self._verifications]):
            self._asked = asked
            try:
                self._drawing = self._begin()
            except (torch.OutOfMemoryError, MemoryError):
                break  # what has been accepted stands, and other draft tokens count as rejected
            self._accept()
        return is_same

    def _begin(self) -> Drawing:
        return Drawing(self._logits, [one for draws in self._asked for one in draws])

    def _accept(self) -> bool:
        tokens = iter(self._drawing.read())
        for one, draws in zip(self._verifications, self._asked, strict=True):
            one.accept([next(tokens) for _ in draws])
        return not self._drawing.revised
