"""State of one chat request: its choices as they grow, and the events and outcome built from them.

Knows neither the model nor the cache. Every choice ends for a reason: a stop token, a stop string,
a tool call or its limit.
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
from workers.engines.llm.grammar import Constraint
from workers.engines.llm.sampling import SampledToken, Sampler
from workers.engines.llm.scheduler import SequenceGroup, TokenSequence
from workers.engines.llm.speculation import PromptLookup
from workers.engines.llm.text import TextStream
from workers.engines.llm.tools import ToolReader, make_reader
from workers.engines.llm.vocabulary import Vocabulary
from workers.protocol.engine import CancelReason


class ChoiceState:
    """One choice. ``limit`` is the most tokens that request and context allow."""

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
        self._emitted = 0
        """Characters that have left the text stream so far, tool calls included."""
        self._logprobs: list[TokenLogprob] | None = [] if chat.logprobs else None
        self._withheld: deque[tuple[int, TokenLogprob]] = deque()
        """Log probabilities of tokens not emitted yet, each with the number of characters that
        precede it."""
        self._stream = TextStream(vocabulary.decode, chat.stop)
        self._reader: ToolReader | None = None
        if chat.tools and chat.tool_choice != "none" and vocabulary.tool_format is not None:
            self._reader = make_reader(vocabulary.tool_format, chat, index)
        self._calls_emitted = 0
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
        start = len(self.prompt)
        return self.prompt[position] if position < start else self.tokens[position - start]

    def ends_at(self, sampled: SampledToken) -> bool:
        """Whether no token can follow this one."""
        return sampled.ends or sampled.token in self._vocabulary.end_tokens

    def add(self, sampled: SampledToken) -> Tokens:
        """Append a token and return the event for it. End the choice if this was its last token."""
        first = not self.tokens
        self.tokens.append(sampled.token)
        if self.lookup is not None:
            self.lookup.add(sampled.token)
        before = self._stream.decoded
        is_end = sampled.token in self._vocabulary.end_tokens
        text = "" if is_end else self._stream.push(sampled.token)
        ended = self.ends_at(sampled)
        at_limit = len(self.tokens) >= self.limit
        if ended or at_limit:
            text += self._stream.flush()
        self._emitted += len(text)
        text = self._extract_calls(text, last=ended or at_limit or self._stream.stopped)
        calls = self._reader.calls[self._calls_emitted :] if self._reader is not None else []
        self._calls_emitted += len(calls)
        if ended or self._stream.stopped:
            self.finish_reason = "tool_calls" if self._calls_emitted else "stop"
        elif self._calls_emitted and not self._chat.parallel_tool_calls:
            self.finish_reason = "tool_calls"
        elif at_limit:
            self.finish_reason = "length"
        if first and self._chat.echo:
            text, self._text = self._text + text, ""
        self._text += text
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self._logprobs is not None:
            if not is_end:
                self._withheld.append((before, self._to_logprob(sampled)))
            logprobs = tuple(self._release_logprobs())
            self._logprobs.extend(logprobs)
        return Tokens(self.index, text, 1, logprobs, self.finish_reason, tuple(calls))

    def choice(self) -> Choice:
        """Return the choice so far; an unfinished one has the finish reason ``stop``."""
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        calls = () if self._reader is None else tuple(self._reader.calls)
        return Choice(self.index, self._text, self.finish_reason or "stop", logprobs, calls)

    def _extract_calls(self, text: str, *, last: bool) -> str:
        """Pass text through the tool reader, if there is one; return what is not a call."""
        if self._reader is None:
            return text
        rest = self._reader.push(text)
        return rest + self._reader.flush() if last else rest

    def _release_logprobs(self) -> Iterator[TokenLogprob]:
        """Yield those of tokens that begin within the emitted text, so none of a stop string."""
        everything = not (self._stream.stopped or self._stream.withholds)
        while self._withheld and (everything or self._withheld[0][0] < self._emitted):
            yield self._withheld.popleft()[1]

    def _to_logprob(self, sampled: SampledToken) -> TokenLogprob:
        assert sampled.logprob is not None
        text_of = self._vocabulary.token_text
        top = tuple((text_of(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(text_of(sampled.token), sampled.logprob, top)


@dataclass(slots=True, eq=False)
class ChatRequest:
    """One job: a sequence group for each prompt, and a choice for each of their sequences."""

    request_id: RequestId
    stream: bool = False
    choices: dict[TokenSequence, ChoiceState] = field(default_factory=dict)
    groups: list[SequenceGroup] = field(default_factory=list)
    cancelled: CancelReason | None = None
    drafted: int = 0
    accepted: int = 0

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices.values())

    @property
    def usage(self) -> Usage:
        """Usage so far. A prompt's tokens count once, however many choices it has."""
        cached = prefilled = 0
        for group in self.groups:
            cached += group.cached_tokens or 0
            prefilled += group.prefilled_max - (group.cached_tokens or 0)
        return Usage(
            requests=1,
            input_tokens=prefilled,
            cached_input_tokens=cached,
            output_tokens=sum(len(choice.tokens) for choice in self.choices.values()),
        )

    def complete(self) -> Completed:
        return Completed(self.usage, self._timings, output=self._output())

    def cancel(self, reason: CancelReason) -> Cancelled:
        return Cancelled(reason, usage=self.usage, timings=self._timings, output=self._output())

    def fail(self, message: str) -> Failed:
        return Failed("engine_error", message, usage=self.usage, timings=self._timings)

    @property
    def _timings(self) -> Timings:
        """Only the counts of draft tokens; the step loop adds the times."""
        return Timings(drafted=self.drafted, accepted=self.accepted)

    def _output(self) -> dict[str, list[Choice]]:
        return {"choices": [choice.choice() for choice in self.choices.values()]}
