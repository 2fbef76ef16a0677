"""Runs the proof of the books in a child process of the lowest priority, so that it takes neither
processor time nor memory from the requests of a gateway.

The child reads the address of the database from its standard input, and ends when that is closed:
with the proof, or with its parent.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Final

import msgspec

from gateway.billing.proof import prove_books
from gateway.ledger.proof.findings import Finding
from gateway.sql.database import Database

NICE: Final = 19


class _Order(msgspec.Struct, frozen=True):
    """What the child has to prove: one line of JSON."""

    url: str
    prepare: bool
    whole: bool


async def prove_in_child(database: Database, *, whole: bool) -> list[Finding]:
    """Prove the books in a child process. Raise ``RuntimeError`` if it fails."""
    order = msgspec.json.encode(_Order(database.url, database.prepare, whole)) + b"\n"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.billing.proof_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        child.stdin.write(order)
        answer, problem = await asyncio.gather(child.stdout.read(), child.stderr.read())
        code = await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if code:
        raise RuntimeError(f"the proof ended with {code}: {problem.decode()[-2000:].strip()}")
    return msgspec.json.decode(answer, type=list[Finding])


def main() -> None:
    """Prove the books, and print the findings as JSON."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICE)
    database = Database(order.url, prepare=order.prepare)
    try:
        findings = prove_books(database, whole=order.whole)
    finally:
        database.dispose()
    sys.stdout.buffer.write(msgspec.json.encode(findings))


def _end_with_parent() -> None:
    # Not through its buffer, which is locked when the interpreter exits.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
