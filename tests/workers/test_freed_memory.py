"""An engine process keeps what it has freed while it has jobs, and returns it when it is idle."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading

import pytest

from workers.agent.environment import engine_environment
from workers.runtime import process

_FREES = """
import os, torch
from workers.runtime.measuring import _resident_bytes
from workers.runtime.process import _trim

def fill():
    torch.ones(100_000_000, dtype=torch.uint8)

for _ in range(20):  # an aligned block does not always fit into one of the same size
    fill()
before = _resident_bytes()
fill()
kept = _resident_bytes()
_trim()
print(before, kept, _resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_large_blocks_are_kept_until_they_are_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREES],
        env=engine_environment(os.environ, threads=1),
        capture_output=True,
        text=True,
        check=True,
    )

    before, kept, returned = map(int, done.stdout.split())
    assert abs(kept - before) < 10_000_000, "a block takes the place of another"
    assert kept - returned > 90_000_000


def test_an_operators_setting_of_the_allocator_is_kept() -> None:
    environ = {"MALLOC_TRIM_THRESHOLD_": "131072"}

    found = engine_environment(environ, threads=None)

    assert found["MALLOC_TRIM_THRESHOLD_"] == "131072"
    assert found["MALLOC_MMAP_THRESHOLD_"]


def test_memory_is_returned_once_for_each_time_without_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[bool] = []
    monkeypatch.setattr(process, "_IDLE_S", 0.0)
    monkeypatch.setattr(process, "_trim", lambda: trimmed.append(True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = process.Connection(theirs)
        waiting = threading.Thread(target=process._wait, args=(connection, None))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        ours.send(b"!")
        waiting.join()

        process._wait(connection, None)
        process._wait(connection, 0.0)

    assert trimmed == [True], "not while commands come, nor between steps"
