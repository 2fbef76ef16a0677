"""The blocks that the cache is made of: which are free, shared, or kept because they may be asked
for again. Pure: it knows block numbers and digests, no tensor and no request.

A block whose content is that of a prompt's beginning is published under a digest of everything up
to its end, so a later prompt that begins alike need not be read again. When its last user has left,
it stays until room is needed; whoever was asked for longest ago goes first. The invariant: a block
is free, idle, or in use by as many as ``users`` says, and never two of these.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

BLANK: Final = 0
"""A block that belongs to nobody: what is written for rows that are idle goes there."""


class BlockPool:
    """Blocks ``1`` to ``count``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._users: dict[int, int] = {}
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many could be taken now."""
        return len(self._free) + len(self._idle)

    def users(self, block: int) -> int:
        return self._users.get(block, 0)

    def take(self, count: int) -> list[int] | None:
        """Take so many blocks, whatever stands in them; None, and nothing taken, if there are not
        as many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._published[self._digests.pop(block)]
            self._users[block] = 1
            taken.append(block)
        return taken

    def find(self, digest: bytes) -> int | None:
        return self._published.get(digest)

    def share(self, block: int) -> None:
        """Use a block together with others, or one that is idle."""
        self._idle.pop(block, None)
        self._users[block] = self.users(block) + 1

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a block by its content, unless they can find another with the same."""
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def drop(self, blocks: Sequence[int]) -> None:
        """Use blocks no more. Of a sequence the last goes idle first, and so is reused first: the
        others can do without it, but not it without them."""
        for block in reversed(blocks):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            elif block in self._digests:
                self._idle[block] = None
            else:
                self._free.append(block)


def digests(owner: str, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Digest what each whole block of a prompt and all before it say.

    ``owner`` goes in first: whether somebody else has sent the same prompt is none's business.
    """
    found = []
    digest = hashlib.blake2b(owner.encode(), digest_size=16)
    for start in _starts(len(tokens), block_tokens):
        digest.update(array("q", tokens[start : start + block_tokens]).tobytes())
        found.append(digest.copy().digest())
    return found


def _starts(tokens: int, block_tokens: int) -> Iterable[int]:
    return range(0, tokens - block_tokens + 1, block_tokens)
