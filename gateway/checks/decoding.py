"""Decodes text and JSON from clients, and refuses values that cannot be stored.

U+0000 is refused because PostgreSQL cannot store it, numbers beyond 64 bits because neither SQL nor
the queue can. The check searches the bytes; only a body that contains the escape is traversed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.errors import InvalidRequest

ID_MAX: Final = 2**63 - 1
"""Largest id of a row in SQL."""
ESCAPED_NULL: Final = b"\\u0000"
"""What a JSON body with U+0000 in a string contains."""


def decode_json(body: bytes | str) -> Any:
    """Decode JSON and check its strings.

    Raise ``msgspec.DecodeError`` if it is not JSON, ``InvalidRequest`` if it cannot be accepted.
    """
    data = body.encode("utf-8", "replace") if isinstance(body, str) else body
    try:
        value = msgspec.json.decode(data)
    except (RecursionError, UnicodeDecodeError) as error:
        raise unreadable(error) from None
    refuse_null(data, value)
    return value


def refuse_null(body: bytes, value: Any) -> None:
    """Raise ``InvalidRequest`` if a string in the JSON ``body``, decoded as ``value``, has U+0000.

    JSON can contain it only as an escape, so a body without the escape is not traversed.
    """
    if ESCAPED_NULL not in body:
        return
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            check_text(item, place)
        elif isinstance(item, dict):
            for name, inner in item.items():
                check_text(name, place)
                waiting.append((f"{place}.{name}" if place else name, inner))
        elif isinstance(item, list):
            prefix = f"{place}." if place else ""
            waiting += [(f"{prefix}{number}", inner) for number, inner in enumerate(item)]


def check_text(text: str, param: str) -> None:
    """Raise ``InvalidRequest`` if a text has U+0000."""
    if "\0" in text:
        where = f" in {param}" if param else ""
        raise InvalidRequest(
            "invalid_value",
            f"The character U+0000{where} is not accepted; leave it out.",
            param=param or None,
        )


def unreadable(error: Exception) -> InvalidRequest:
    """Return the error for a body that could not be decoded."""
    if isinstance(error, RecursionError):
        return InvalidRequest("invalid_json", "The body is nested too deeply.")
    return InvalidRequest("invalid_json", "The body is not valid UTF-8.")


def read_id(text: str) -> int | None:
    """Parse the id of a row in SQL; None if the text is not one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        return None
    number = int(text)
    return number if number <= ID_MAX else None
