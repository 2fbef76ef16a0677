"""The pool of KV cache blocks: which are free, in use, or kept idle for reuse by later prompts.

Pure: knows block numbers and digests, no tensors and no requests. A full block is published under a
digest of the text up to the block's end, so that a later prompt with the same prefix need not
prefill it again. After its last user has freed it, a published block stays idle
until its room is needed; the least recently used is evicted first. Invariant: every block is in
exactly one of three states: free, idle, or in use with a count in ``users``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Final

ZERO_BLOCK: Final = 0
"""A block that is never allocated or written; pads block tables to equal length."""


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
        """Number of blocks that can be allocated now: free and idle ones."""
        return len(self._free) + len(self._idle)

    def users(self, block: int) -> int:
        return self._users.get(block, 0)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks of undefined content, or None if fewer are available."""
        if count > self.available:
            return None
        allocated = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._published[self._digests.pop(block)]
            self._users[block] = 1
            allocated.append(block)
        return allocated

    def find(self, digest: bytes) -> int | None:
        return self._published.get(digest)

    def share(self, block: int) -> None:
        """Add a user to a block that is in use or idle."""
        self._idle.pop(block, None)
        self._users[block] = self.users(block) + 1

    def publish(self, block: int, digest: bytes) -> None:
        """Make a block findable by its digest, unless another block has the same one."""
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a user from each block.

        A sequence's last block becomes idle first and is therefore evicted first: later blocks are
        useless without the earlier ones, but not vice versa.
        """
        for block in reversed(blocks):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            elif block in self._digests:
                self._idle[block] = None
            else:
                self._free.append(block)


class Digests:
    """A digest for each full block of a text that grows, covering all tokens up to its end.

    ``owner`` is part of every digest, so that no account can find out what another has sent.
    """

    def __init__(self, owner: str, block_tokens: int) -> None:
        self.found: list[bytes] = []
        self._block_tokens = block_tokens
        self._rest = array("q")
        """Tokens after the last full block."""
        self._hash = hashlib.blake2b(owner.encode(), digest_size=16)

    def extend(self, tokens: Sequence[int]) -> None:
        self._rest.extend(tokens)
        size = self._block_tokens
        full = len(self._rest) // size * size
        for start in range(0, full, size):
            self._hash.update(self._rest[start : start + size].tobytes())
            self.found.append(self._hash.copy().digest())
        del self._rest[:full]

    def copy(self) -> Digests:
        """Return one that continues apart."""
        other = copy(self)
        other.found, other._rest = self.found[:], self._rest[:]
        other._hash = self._hash.copy()
        return other
