"""Ids of requests and of other things that are listed by time: a prefix and a UUID of version 7."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from typing import Final

from workers.contract.jobs import RequestId

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")


def new_request_id() -> RequestId:
    return RequestId(new_id("req_"))


def new_id(prefix: str) -> str:
    """48 bits of Unix milliseconds, then random bits (RFC 9562): later ids sort later."""
    value = time.time_ns() // 1_000_000 << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{prefix}{value:032x}"


def first_request_id(moment: datetime) -> RequestId:
    """The least id that a request made at a moment, or after it, can have."""
    return RequestId(f"req_{max(int(moment.timestamp() * 1000), 0):012x}")


def is_request_id(text: str) -> bool:
    return is_id("req_", text)


def is_id(prefix: str, text: str) -> bool:
    """Say whether a text could be an id that begins so; what is none need not be looked for."""
    return text.startswith(prefix) and _DIGITS.fullmatch(text, len(prefix)) is not None
