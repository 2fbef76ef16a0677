"""What pages can follow, and who may: a registry of topics.

A page names what it follows by ``data-live``: the name of a topic, or the topic and what it is
about, such as ``request/req_01``. A topic finds the subject of such a name for a visitor. Viewers
with equal subjects share one feed, which exists only while somebody watches.

A message has some of these parts, which ``assets/live.js`` applies:

- ``texts``: texts by name, for elements with ``data-text``, ``data-value`` or ``data-points``.
- ``version``: if it changes, the page reads its parts again from its own document.
- ``rows``, ``more`` and ``paused``: rows that enter a table at the top.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from gateway.api.http.request import Services
from gateway.console.guards import no_page
from gateway.console.roles import MAY, Act
from gateway.console.visitors import Visitor

NAME_MAX: Final = 1000
"""Maximum length of what a page follows, in characters."""

Message: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[], Message | None]
"""Returns what one viewer has not got yet: the newest state, whatever was missed in between."""


class Feed(Protocol):
    """The state of a subject, sampled while somebody watches."""

    @property
    def interval_s(self) -> float: ...

    async def sample(self) -> bool:
        """Look again; return whether viewers have something to get."""
        ...

    def reader(self) -> Reader: ...


@dataclass(frozen=True, slots=True)
class LiveSubject:
    """What a viewer follows, and which act of the console it takes: in an account, or in the whole
    installation. Subjects with equal keys are the same."""

    key: Hashable
    act: Act
    account_id: int | None
    feed: Callable[[], Feed] = field(compare=False)
    read: Callable[[Any], Reader] = field(default=lambda feed: feed.reader(), compare=False)
    """Creates a viewer's reader from the feed."""

    def is_open_to(self, visitor: Visitor) -> bool:
        if self.account_id is None:
            return visitor.role in MAY[self.act]
        return visitor.may(self.act, self.account_id)


@dataclass(frozen=True, slots=True)
class Topic:
    """A kind of subjects. ``find`` gets what follows the topic's name, and raises ``NotFound`` if
    the subject does not exist."""

    name: str
    find: Callable[[Services, Visitor, str], Awaitable[LiveSubject]]


class Latest:
    """A feed of messages that replace each other; one that is like the last is not sent."""

    def __init__(self, read: Callable[[], Awaitable[Message]], *, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self._read = read
        self._message: Message = {}
        self._number = 0

    async def sample(self) -> bool:
        found = await self._read()
        if found == self._message:
            return False
        self._message, self._number = found, self._number + 1
        return True

    def reader(self) -> Reader:
        got = 0

        def read() -> Message | None:
            nonlocal got
            if got == self._number:
                return None
            got = self._number
            return self._message

        return read


def installation_topic(
    name: str, read: Callable[[Services], Awaitable[Message]], *, interval_s: float = 1.0
) -> Topic:
    """Create a topic about the whole installation, for roles of the installation."""

    async def find(services: Services, visitor: Visitor, rest: str) -> LiveSubject:
        if rest:
            raise no_page()

        async def look() -> Message:
            return await read(services)

        return LiveSubject(
            name, "installation.read", None, lambda: Latest(look, interval_s=interval_s)
        )

    return Topic(name, find)


async def find_subject(
    topics: Mapping[str, Topic], services: Services, visitor: Visitor, name: str
) -> LiveSubject:
    """Find what a page follows. Raise ``NotFound`` unless the visitor may see it: what it may not
    see looks like what does not exist."""
    kind, _, rest = name.partition("/")
    topic = topics.get(kind)
    if topic is None or len(name) > NAME_MAX:
        raise no_page()
    subject = await topic.find(services, visitor, rest)
    if not subject.is_open_to(visitor):
        raise no_page()
    return subject
