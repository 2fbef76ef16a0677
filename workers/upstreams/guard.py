"""Runs a command so that nothing of it outlives the worker: the process between the two.

The worker holds the other end of standard input. If that ends, because the worker stops the command
or has died, the command's whole process group is asked to end, and after a while killed. If the
command ends, what is left of its group is killed. Uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

NOT_FOUND = 127
NOT_STARTED = 126
_LOOK_S = 0.2


def main() -> int:
    patience_s, command = float(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Handled, not ignored: a new program inherits what is ignored.
        signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except FileNotFoundError:
        return _refuse(f"{command[0]}: not found", NOT_FOUND)
    except OSError as error:
        return _refuse(f"{command[0]}: {error.strerror}", NOT_STARTED)
    while process.poll() is None:
        if select.select([0], [], [], _LOOK_S)[0] and not os.read(0, 1):
            _end(process, patience_s)
            break
    _signal(process, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    _signal(process, signal.SIGTERM)
    until_s = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S / 4)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _refuse(message: str, status: int) -> int:
    sys.stderr.write(message + "\n")
    return status


def arguments(command: Sequence[str], *, patience_s: float) -> list[str]:
    """Return the command that runs ``command`` under guard."""
    return [sys.executable, "-I", "-S", __file__, str(patience_s), *command]


if __name__ == "__main__":
    sys.exit(main())
