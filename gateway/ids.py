"""Ids of requests and of other objects that are listed by time: a prefix and a UUID version 7."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from typing import Final

from workers.contract.jobs import RequestId

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")


def new_request_id() -> RequestId:
    return RequestId(new_id("req_"))


def new_id(prefix: str) -> str:
    """Create an id that sorts by time: Unix milliseconds and their 4,096ths, then random bits
    (RFC 9562, method 3), so that ids of one process sort as they were created."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    value = milliseconds << 80 | 0x7 << 76 | (rest << 12) // 1_000_000 << 64
    value |= 0x2 << 62 | int.from_bytes(os.urandom(8)) >> 2
    return f"{prefix}{value:032x}"


def first_request_id(moment: datetime) -> RequestId:
    """Return the smallest id that a request created at or after a moment can have."""
    return RequestId(first_id("req_", moment))


def first_id(prefix: str, moment: datetime) -> str:
    """Return the smallest id with this prefix that can be created at or after a moment."""
    return f"{prefix}{max(int(moment.timestamp() * 1000), 0):012x}"


def id_before(moment: datetime) -> RequestId:
    """Return an id like that of a request, which is before those of all requests since a moment."""
    return RequestId(first_request_id(moment).ljust(len("req_") + 32, "0"))


def time_of(prefix: str, id: str) -> datetime:
    """Return the moment at which an id with this prefix was created."""
    return datetime.fromtimestamp(int(id.removeprefix(prefix)[:12], 16) / 1000, UTC)


def is_request_id(text: str) -> bool:
    return is_id("req_", text)


def is_id(prefix: str, text: str) -> bool:
    """Whether a text has the form of an id with this prefix; other texts need no query."""
    return text.startswith(prefix) and _DIGITS.fullmatch(text, len(prefix)) is not None
