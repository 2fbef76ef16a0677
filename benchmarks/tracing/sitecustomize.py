"""Lets ``benchmarks.counts`` record which functions and which SQL statements a process runs.

A process imports this module at its start when this folder is on ``PYTHONPATH``. The first SIGUSR2
starts the recording, the second ends it and writes ``<pid>.json`` to ``$PYTHONTRACEFOLDER``.
Functions are recorded only if ``$PYTHONTRACEFUNCTIONS`` is set, because that slows every call.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_FOLDER = os.environ.get("PYTHONTRACEFOLDER")
_FUNCTIONS = bool(os.environ.get("PYTHONTRACEFUNCTIONS"))
_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / name) + os.sep for name in ("gateway", "workers"))
_called: set[CodeType] = set()
_statements: list[tuple[float, str]] = []
_recording = False
_connect: Any = sqlite3.connect


def _note_call(frame: FrameType, event: str, argument: object) -> None:
    if _recording and event == "call":
        _called.add(frame.f_code)


def _note_statement(statement: str) -> None:
    # A line of a trigger's body starts with a comment.
    if _recording and not statement.startswith("--"):
        _statements.append((time.monotonic(), statement))


def _traced_connect(*arguments: Any, **named: Any) -> sqlite3.Connection:
    connection: sqlite3.Connection = _connect(*arguments, **named)
    connection.set_trace_callback(_note_statement)
    return connection


def _toggle(number: int, frame: FrameType | None) -> None:
    global _recording
    if not _recording:
        _called.clear()
        _statements.clear()
        _recording = True
        if _FUNCTIONS:
            sys.setprofile(_note_call)
        return
    _recording = False
    sys.setprofile(None)
    names = sorted(
        f"{Path(code.co_filename).relative_to(_ROOT)}:{code.co_qualname}"
        for code in _called
        if code.co_filename.startswith(_OURS) and not code.co_name.endswith(("comp>", "<genexpr>"))
    )
    part = Path(_FOLDER or ".") / f"{os.getpid()}.part"
    part.write_text(json.dumps({"functions": names, "statements": _statements}))
    part.rename(part.with_suffix(".json"))


if _FOLDER:
    signal.signal(signal.SIGUSR2, _toggle)
    if _FUNCTIONS:
        threading.setprofile(_note_call)
    for module in (sqlite3, sqlite3.dbapi2):
        setattr(module, "connect", _traced_connect)  # noqa: B010 (it has overloads)
