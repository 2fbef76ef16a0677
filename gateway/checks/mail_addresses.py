"""Checks mail addresses that people enter. Pure."""

from __future__ import annotations

import re
from typing import Final

ADDRESS_MAX: Final = 254
# RFC 5321 without quoted local parts and address literals. Nothing that it accepts can end a header
# or a command, or add a recipient.
_ADDRESS: Final = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)
_LOCAL_MAX: Final = 64


def check_mail_address(address: str) -> str:
    """Check a mail address. Raise ``ValueError``."""
    local = address.partition("@")[0]
    if len(address) > ADDRESS_MAX or len(local) > _LOCAL_MAX or not _ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is not a valid mail address; send one such as ops@example.com, without "
            "a name, quotes or characters beyond ASCII"
        )
    return address
