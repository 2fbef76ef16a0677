"""Prompts are deleted from disk in time; files and secrets are readable only as far as needed."""

from __future__ import annotations

import os
import pty
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.sql.database import Database
from gateway.up.children import rotate
from gateway.up.queue_server import arguments
from tests.cli.test_up import Up, keys
from tests.databases import migrated_file
from tests.stack import chat, wait_for

PROMPT = "a-prompt-that-nothing-else-contains"
ERASED_WITHIN_S = 90.0
"""docs/start/deploy.md: erased at most a minute and a half after the end of a request."""
SECRETS = {
    "GMI_API_KEY": "the-upstreams-credential",
    "TOLLGATE_PEPPER": "the-peppers-own-value-for-this-test",
    "STRIPE_API_KEY": "the-payment-providers-key",
    "STRIPE_WEBHOOK_SECRET": "the-payment-providers-secret",
    "TOLLGATE_METRICS_TOKEN": "the-scrapers-token",
    "UNRELATED_SECRET": "of-something-else-on-this-machine",
}


@pytest.fixture
def open_home(home: Path) -> Path:
    """A home that its operator made, with a file of an earlier version in it."""
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    (home / "blobs" / "1").mkdir(parents=True)
    (home / "blobs" / "1" / "old").write_text("left by an earlier version")
    (home / "appendonlydir").mkdir()
    (home / "appendonlydir" / "appendonly.aof.1.incr.aof").write_text(PROMPT)
    return home


@pytest.fixture
def up(open_home: Path) -> Iterator[Up]:
    started = Up(open_home, **SECRETS)
    started.wait()
    yield started
    started.process.send_signal(signal.SIGINT)
    started.process.wait(timeout=60)


def say_the_prompt(up: Up) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{up.port}/v1/chat/completions",
        headers={"Authorization": f"Bearer {keys(up.home)['TOLLGATE_API_KEY']}"},
        # The model repeats what it reads, and answers are kept: one token does not give it away.
        json=chat("echo", f"yes {PROMPT * 50}", max_tokens=1),
        timeout=30,
    )
    assert answer.status_code == 200, answer.text


def files_with(text: str, home: Path) -> list[str]:
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


def environments(up: Up) -> dict[str, str]:
    """What the kernel shows of each descendant's environment, by its command."""
    found = {}
    for pid in up.descendants():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found[f"{pid} {command}"] = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_and_processes_of_up_are_closed_and_prompts_are_erased_in_time(up: Up) -> None:
    say_the_prompt(up)

    exposed = [
        str(path)
        for path in (up.home, *up.home.rglob("*"))
        if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert exposed == []

    # The output of `up` is kept in a journal unless it is a terminal.
    assert keys(up.home)["TOLLGATE_API_KEY"] not in up.said.read_text()
    assert f"in {up.home / 'first-keys.env'}" in up.said.read_text()

    children = environments(up)
    gateway = next(text for name, text in children.items() if "gateway serve" in name)
    worker = next(text for name, text in children.items() if name.endswith("-m workers "))
    queue = next(text for name, text in children.items() if "server" in name.split()[1])
    assert {name for name in SECRETS if SECRETS[name] in gateway} == {
        "TOLLGATE_PEPPER",
        "STRIPE_API_KEY",
        "STRIPE_WEBHOOK_SECRET",
        "TOLLGATE_METRICS_TOKEN",
    }
    assert {name for name in SECRETS if SECRETS[name] in worker} == {"GMI_API_KEY"}
    assert "DATABASE_URL" not in worker
    assert not any(secret in queue for secret in SECRETS.values())
    assert "TOLLGATE_" not in queue
    assert "DATABASE_URL" not in queue

    # The log of the database is emptied once a minute; all else is gone with the answer.
    wait_for(
        lambda: not files_with(PROMPT, up.home), "the prompt to go", patience_s=ERASED_WITHIN_S
    )


def test_key_is_printed_to_a_terminal(home: Path) -> None:
    ours, theirs = pty.openpty()
    started = Up(home, output=theirs)
    said = b""
    try:
        while b"\ncurl " not in said and started.process.poll() is None:
            said += os.read(ours, 4096)
        assert f"API key   {keys(home)['TOLLGATE_API_KEY']} " in said.decode()
    finally:
        started.process.send_signal(signal.SIGINT)
        started.process.wait(timeout=60)
        os.close(ours)
        os.close(theirs)


def test_embedded_queue_server_writes_nothing_to_disk(tmp_path: Path) -> None:
    command = arguments("server", home=tmp_path, socket=tmp_path / "s")

    assert command[command.index("--appendonly") + 1] == "no"
    assert command[command.index("--save") + 1] == ""


def test_deleted_rows_are_overwritten_in_sqlites_files(tmp_path: Path) -> None:
    database = Database(migrated_file(tmp_path / "tollgate.db"))
    try:
        with database.transaction() as connection:
            connection.exec_driver_sql("CREATE TABLE jobs (job TEXT)")
            connection.exec_driver_sql("INSERT INTO jobs VALUES (?)", (PROMPT * 1000,))
        with database.transaction() as connection:
            connection.exec_driver_sql("DELETE FROM jobs")

        assert files_with(PROMPT, tmp_path)
        assert database.empty_log()
        assert not files_with(PROMPT, tmp_path)
    finally:
        database.dispose()


def test_log_that_a_reader_holds_is_left_for_later(tmp_path: Path) -> None:
    database = Database(migrated_file(tmp_path / "tollgate.db"))
    try:
        with database.snapshot() as reader:
            reader.exec_driver_sql("SELECT count(*) FROM accounts").scalar()
            with database.transaction() as connection:
                connection.exec_driver_sql("CREATE TABLE jobs (job TEXT)")
            assert not database.empty_log()
        assert database.empty_log()
    finally:
        database.dispose()


def test_log_is_rotated_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"a" * 100)
        rotate(log, bytes_max=50)
        writer.write(b"b" * 10)

    assert log.read_bytes() == b"b" * 10
    assert log.with_suffix(".log.1").read_bytes() == b"a" * 100
