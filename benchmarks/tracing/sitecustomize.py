"""Lets ``benchmarks.functions`` record which functions a process calls.

A process imports this module at its start when this folder is on ``PYTHONPATH``. The first SIGUSR2
starts the recording, the second ends it and writes ``<pid>.json`` to ``$PYTHONTRACEFOLDER``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

_FOLDER = os.environ.get("PYTHONTRACEFOLDER")
_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / name) + os.sep for name in ("gateway", "workers"))
_called: set[CodeType] = set()
_recording = False


def _note(frame: FrameType, event: str, argument: object) -> None:
    if _recording and event == "call":
        _called.add(frame.f_code)


def _toggle(number: int, frame: FrameType | None) -> None:
    global _recording
    if not _recording:
        _called.clear()
        _recording = True
        sys.setprofile(_note)
        return
    _recording = False
    sys.setprofile(None)
    names = sorted(
        f"{Path(code.co_filename).relative_to(_ROOT)}:{code.co_qualname}"
        for code in _called
        if code.co_filename.startswith(_OURS) and not code.co_name.endswith(("comp>", "<genexpr>"))
    )
    part = Path(_FOLDER or ".") / f"{os.getpid()}.part"
    part.write_text(json.dumps(names))
    part.rename(part.with_suffix(".json"))


if _FOLDER:
    signal.signal(signal.SIGUSR2, _toggle)
    threading.setprofile(_note)
