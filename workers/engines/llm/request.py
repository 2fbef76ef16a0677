"""One job while it is answered: its choices as they grow, and what is to be reported of them.

It knows no model and no cache; every choice ends with a reason: a stop token, a stop string, a
call, or its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.contract.jobs import (
    Cancelled,
    ChatInput,
    Choice,
    Completed,
    Failed,
    FinishReason,
    RequestId,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.engines.llm.drafts import PromptLookup
from workers.engines.llm.grammar import Constraint
from workers.engines.llm.sampling import SampledToken, Sampler
from workers.engines.llm.scheduler import SequenceGroup, TokenSequence
from workers.engines.llm.text import TextStream
from workers.engines.llm.tools import ToolReader, make_reader
from workers.engines.llm.vocabulary import Vocabulary
from workers.protocol.engine import CancelReason


class ChoiceState:
    """One choice. ``limit`` is the most tokens it may have, by request and by context."""

    def __init__(
        self,
        index: int,
        chat: ChatInput,
        vocabulary: Vocabulary,
        *,
        prompt: Sequence[int],
        limit: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.limit = limit
        self.lookup: PromptLookup | None = None
        self._chat = chat
        self._vocabulary = vocabulary
        self._text = ""
        self._shown = 0
        """Characters that were let through so far, calls included."""
        self._logprobs: list[TokenLogprob] | None = [] if chat.logprobs else None
        self._withheld: deque[tuple[int, TokenLogprob]] = deque()
        """Of tokens that are not shown yet, with the characters that went before each."""
        self._stream = TextStream(vocabulary.decode, chat.stop)
        self._reader: ToolReader | None = None
        if chat.tools and chat.tool_choice != "none" and vocabulary.tool_format is not None:
            self._reader = make_reader(vocabulary.tool_format, chat, index)
        self._called = 0
        self.sampler = Sampler(
            chat,
            prompt=prompt,
            vocabulary=vocabulary.size,
            seed=chat.seed + index,
            constraint=constraint,
        )
        if chat.echo:
            self._text = vocabulary.decode(prompt)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def token_at(self, position: int) -> int:
        """A token of the prompt or of the answer."""
        before = len(self.prompt)
        return self.prompt[position] if position < before else self.tokens[position - before]

    def ends_at(self, chosen: SampledToken) -> bool:
        """Whether nothing can come after a token."""
        return chosen.ends or chosen.token in self._vocabulary.end_tokens

    def add(self, chosen: SampledToken) -> Tokens:
        """Append a token, end if this was the end, and say what is new."""
        first = not self.tokens
        self.tokens.append(chosen.token)
        if self.lookup is not None:
            self.lookup.add(chosen.token)
        before = self._stream.received
        is_end = chosen.token in self._vocabulary.end_tokens
        text = "" if is_end else self._stream.push(chosen.token)
        ended = self.ends_at(chosen)
        at_limit = len(self.tokens) >= self.limit
        if ended or at_limit:
            text += self._stream.flush()
        self._shown += len(text)
        calls = self._read_calls(text, last=ended or at_limit or self._stream.stopped)
        if calls is not None:
            text = calls
        made = self._reader.calls[self._called :] if self._reader is not None else []
        self._called += len(made)
        if ended or self._stream.stopped:
            self.finish_reason = "tool_calls" if self._called else "stop"
        elif self._called and not self._chat.parallel_tool_calls:
            self.finish_reason = "tool_calls"
        elif at_limit:
            self.finish_reason = "length"
        if first and self._chat.echo:
            text, self._text = self._text + text, ""
        self._text += text
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self._logprobs is not None:
            if not is_end:
                self._withheld.append((before, self._show(chosen)))
            logprobs = tuple(self._release_logprobs())
            self._logprobs.extend(logprobs)
        return Tokens(self.index, text, 1, logprobs, self.finish_reason, tuple(made))

    def choice(self) -> Choice:
        """What there is so far; of one that was broken off the reason is ``stop``."""
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        calls = () if self._reader is None else tuple(self._reader.calls)
        return Choice(self.index, self._text, self.finish_reason or "stop", logprobs, calls)

    def _read_calls(self, text: str, *, last: bool) -> str | None:
        """Part the calls from the text, where there may be any."""
        if self._reader is None:
            return None
        shown = self._reader.push(text)
        return shown + self._reader.flush() if last else shown

    def _release_logprobs(self) -> Iterator[TokenLogprob]:
        """Give those of tokens that begin in the text shown so far: none of a stop string."""
        everything = not (self._stream.stopped or self._stream.withholds)
        while self._withheld and (everything or self._withheld[0][0] < self._shown):
            yield self._withheld.popleft()[1]

    def _show(self, chosen: SampledToken) -> TokenLogprob:
        assert chosen.logprob is not None
        show = self._vocabulary.show
        top = tuple((show(token), logprob) for token, logprob in chosen.top)
        return TokenLogprob(show(chosen.token), chosen.logprob, top)


@dataclass(slots=True, eq=False)
class ChatRequest:
    """One job: the seats of its prompts, and an answer for each of their chains."""

    request_id: RequestId
    stream: bool = False
    answers: dict[TokenSequence, ChoiceState] = field(default_factory=dict)
    seats: list[SequenceGroup] = field(default_factory=list)
    cancelled: CancelReason | None = None
    drafted: int = 0
    accepted: int = 0

    @property
    def ended(self) -> bool:
        return all(answer.ended for answer in self.answers.values())

    @property
    def usage(self) -> Usage:
        """Of each prompt what was read, once, however many answers it was given."""
        cached = read = 0
        for seat in self.seats:
            cached += seat.cached or 0
            read += seat.furthest - (seat.cached or 0)
        return Usage(
            requests=1,
            input_tokens=read,
            cached_input_tokens=cached,
            output_tokens=sum(len(answer.tokens) for answer in self.answers.values()),
        )

    def complete(self) -> Completed:
        return Completed(self.usage, self._timings, output=self._output())

    def break_off(self, reason: CancelReason) -> Cancelled:
        return Cancelled(reason, usage=self.usage, timings=self._timings, output=self._output())

    def fail(self, message: str) -> Failed:
        return Failed("engine_error", message, usage=self.usage, timings=self._timings)

    @property
    def _timings(self) -> Timings:
        """Of the times the loop knows; only what was guessed is known here."""
        return Timings(drafted=self.drafted, accepted=self.accepted)

    def _output(self) -> dict[str, list[Choice]]:
        return {"choices": [answer.choice() for answer in self.answers.values()]}
