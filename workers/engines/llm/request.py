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
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.grammar import Constraint
from workers.engines.llm.sampling import SampledToken, Sampler
from workers.engines.llm.scheduling.blocks import Digests
from workers.engines.llm.scheduling.scheduler import SequenceGroup, TokenSequence
from workers.engines.llm.speculation import PromptLookup
from workers.engines.llm.text import TextStream, ThoughtReader
from workers.engines.llm.tools import ToolReader, make_reader
from workers.engines.llm.vision.pictures import PicturePrompt
from workers.engines.llm.vocabulary import Vocabulary
from workers.protocol.engine import CancelReason


def refuse(
    chat: ChatInput, vocabulary: Vocabulary, *, name: str, slots: int, reads_pictures: bool
) -> Failed | None:
    """Refuse what a model does not support or what could harm other requests.

    The gateway has checked everything else. ``name`` is that of the model.
    """
    size = vocabulary.size
    if not reads_pictures and any(message.parts for message in chat.messages):
        return Failed("invalid_input", f"{name} reads no images.", param="messages")
    if chat.tools and chat.tool_choice != "none" and vocabulary.tool_format is None:
        return Failed(
            "unsupported_parameter",
            "This model does not support function calling: its chat template has no tools. "
            "Omit tools.",
            param="tools",
        )
    if chat.tool_name is not None and chat.tool_name not in {tool.name for tool in chat.tools}:
        return Failed(
            "invalid_input",
            f"tool_choice names {chat.tool_name!r}, which is not among the tools.",
            param="tool_choice",
        )
    if not 1 <= chat.n <= slots:
        return Failed(
            "invalid_input", f"n is {chat.n}; this model accepts 1 to {slots}.", param="n"
        )
    if chat.max_tokens < 1:
        return Failed(
            "invalid_input",
            f"max_tokens is {chat.max_tokens}; it must be at least 1.",
            param="max_tokens",
        )
    if unknown := [token for token in chat.logit_bias if not 0 <= token < size]:
        return Failed(
            "invalid_input",
            f"logit_bias contains token {unknown[0]}; tokens are 0 to {size - 1}.",
            param="logit_bias",
        )
    return None


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
        pictures: PicturePrompt | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.pictures = pictures
        """Those of the prompt, if it has any."""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.limit = limit
        self.lookup: PromptLookup | None = None
        self.digests: Digests | None = None
        """Digests of the prompt and answer so far, if later prompts may find the answer."""
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
        self._reasoning = ""
        self._reasoning_tokens = 0
        self._thoughts: ThoughtReader | None = None
        # A grammar leaves no room for thoughts, and the text of a raw prompt is the client's.
        if constraint is None and not chat.prompts:
            self._thoughts = vocabulary.thoughts(prompt)
        self.sampler = Sampler(
            chat,
            prompt=prompt,
            seed=chat.seed + index,
            constraint=constraint,
        )
        if chat.echo:
            self._text = vocabulary.decode(prompt)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def shift(self) -> int:
        """Position of the answer's tokens, less their index."""
        return 0 if self.pictures is None else self.pictures.shift

    def prompt_input(
        self, start: int, stop: int, blocks: Sequence[int], *, logits_kept: int
    ) -> SequenceInput:
        """Return tokens ``[start, stop)`` of the prompt; their pictures have been encoded."""
        part = None if self.pictures is None else self.pictures.part(start, stop)
        return SequenceInput(self.prompt[start:stop], start, blocks, logits_kept, pictures=part)

    @property
    def length(self) -> int:
        """Number of tokens that are known, those of the prompt included."""
        return len(self.prompt) + len(self.tokens)

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
        last = ended or at_limit or self._stream.stopped
        reasoning, text = self._extract_thoughts(text, last=last)
        text = self._extract_calls(text, last=last)
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
        return Tokens(
            self.index, text, 1, logprobs, self.finish_reason, tuple(calls), reasoning=reasoning
        )

    def choice(self) -> Choice:
        """Return the choice so far; an unfinished one has the finish reason ``stop``."""
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        calls = () if self._reader is None else tuple(self._reader.calls)
        return Choice(
            self.index,
            self._text,
            self.finish_reason or "stop",
            logprobs,
            calls,
            self._reasoning,
            self._reasoning_tokens,
        )

    def _extract_thoughts(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return new thoughts, and the text that is none. Count the token if it is theirs."""
        reader = self._thoughts
        if reader is None:
            return "", text
        was_inside = reader.inside
        reasoning, text = reader.push(text)
        if last:
            more = reader.flush()
            reasoning, text = reasoning + more[0], text + more[1]
        self._reasoning += reasoning
        self._reasoning_tokens += was_inside or reader.inside
        return reasoning, text

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
