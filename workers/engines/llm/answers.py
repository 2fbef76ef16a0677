"""One job while it is answered: its choices as they grow, and what is to be reported of them.

It knows no model and no cache but by slot numbers; every choice ends with a reason, at a stop
token, a stop string, or its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.contract.jobs import (
    Cancelled,
    ChatInput,
    Choice,
    Completed,
    Failed,
    FinishReason,
    RequestId,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.engines.llm.sampling import Chosen, Sampler
from workers.engines.llm.scheduler import Seat
from workers.engines.llm.text import TextStream
from workers.engines.llm.vocabulary import Vocabulary
from workers.engines.protocol import CancelReason


class Answer:
    """One choice. ``limit`` is the most tokens it may have, by request and by context."""

    def __init__(
        self,
        index: int,
        chat: ChatInput,
        vocabulary: Vocabulary,
        *,
        prompt: Sequence[int],
        limit: int,
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._vocabulary = vocabulary
        self._prompt_tokens = len(prompt)
        self._limit = limit
        self._text = ""
        self._logprobs: list[TokenLogprob] | None = [] if chat.logprobs else None
        self._withheld: deque[tuple[int, TokenLogprob]] = deque()
        """Of tokens that are not shown yet, with the characters that went before each."""
        self._stream = TextStream(vocabulary.decode, chat.stop)
        self._sampler = Sampler(
            chat, prompt=prompt, vocabulary=vocabulary.size, seed=chat.seed + index
        )
        self.choose = self._sampler.choose

    @property
    def last(self) -> tuple[int, int]:
        """The last token, which is not in the cache yet, and the position where it will be."""
        return self.tokens[-1], self._prompt_tokens + len(self.tokens) - 1

    def add(self, chosen: Chosen) -> Tokens:
        """Append a token, end if this was the end, and say what is new."""
        self.tokens.append(chosen.token)
        before = self._stream.received
        ended = chosen.token in self._vocabulary.end_tokens
        text = "" if ended else self._stream.push(chosen.token)
        at_limit = len(self.tokens) >= self._limit
        if ended or at_limit:
            text += self._stream.flush()
        if ended or self._stream.stopped:
            self.finish_reason = "stop"
        elif at_limit:
            self.finish_reason = "length"
        self._text += text
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self._logprobs is not None:
            if not ended:
                self._withheld.append((before, self._show(chosen)))
            logprobs = tuple(self._release_logprobs())
            self._logprobs.extend(logprobs)
        return Tokens(self.index, text, 1, logprobs, self.finish_reason)

    def choice(self) -> Choice:
        """What there is so far; of one that was broken off the reason is ``stop``."""
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        return Choice(self.index, self._text, self.finish_reason or "stop", logprobs)

    def _release_logprobs(self) -> Iterator[TokenLogprob]:
        """Give those of tokens that begin in the text shown so far: none of a stop string."""
        everything = not (self._stream.stopped or self._stream.withholds)
        while self._withheld and (everything or self._withheld[0][0] < len(self._text)):
            yield self._withheld.popleft()[1]

    def _show(self, chosen: Chosen) -> TokenLogprob:
        assert chosen.logprob is not None
        show = self._vocabulary.show
        top = tuple((show(token), logprob) for token, logprob in chosen.top)
        return TokenLogprob(show(chosen.token), chosen.logprob, top)


@dataclass(slots=True, eq=False)
class Answering:
    """One job: its seat, its prompt, and an answer for each slot of the seat."""

    request_id: RequestId
    seat: Seat
    prompt: list[int]
    answers: list[Answer]
    cancelled: CancelReason | None = None

    @property
    def open(self) -> list[tuple[int, Answer]]:
        """The choices that go on, each with its slot."""
        pairs = zip(self.seat.slots, self.answers, strict=True)
        return [(slot, answer) for slot, answer in pairs if answer.finish_reason is None]

    @property
    def extent(self) -> int:
        """The most positions that any of its slots may have been written to."""
        return len(self.prompt) + max(len(answer.tokens) for answer in self.answers)

    @property
    def usage(self) -> Usage:
        return Usage(
            requests=1,
            input_tokens=self.seat.read,
            output_tokens=sum(len(answer.tokens) for answer in self.answers),
        )

    def complete(self) -> Completed:
        return Completed(self.usage, output=self._output())

    def break_off(self, reason: CancelReason) -> Cancelled:
        return Cancelled(reason, usage=self.usage, output=self._output())

    def fail(self) -> Failed:
        message = "The model gave no numbers that a token could be chosen by."
        return Failed("engine_error", message, usage=self.usage)

    def _output(self) -> dict[str, list[Choice]]:
        return {"choices": [answer.choice() for answer in self.answers]}
