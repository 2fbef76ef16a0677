"""Crashes while a voice is stored or deleted leave no orphaned blob and revive no voice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from gateway.sql.database import Database
from gateway.tables.voices import voice_recordings
from gateway.voices.store import delete_ended_recordings
from tests.failures.conftest import own_stack
from tests.gateway.test_voices import SAMPLE
from tests.stack import Caller, Stack, ended
from workers.contract.blobs import Blobs

pytestmark = pytest.mark.timeout(300)


def keep_consent(caller: Caller) -> str:
    answer = caller.http.post(
        "/v1/audio/voice_consents",
        data={"name": "c", "language": "en"},
        files={"recording": SAMPLE},
    )
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def keep_voice(caller: Caller, consent_id: str) -> dict[str, Any]:
    answer = caller.http.post(
        "/v1/audio/voices",
        data={"name": "Anna", "consent": consent_id},
        files={"audio_sample": SAMPLE},
    )
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def lying(stack: Stack, caller: Caller) -> set[str]:
    """Ids under which the account has something in the store."""
    folder = stack.directory / "blobs" / str(caller.account_id)
    return {path.parts[-3] for path in folder.rglob("*") if path.is_file()}


def clear(stack: Stack, *, later: timedelta) -> None:
    """Clear away what is due, as the gateway does by itself, after some time."""

    async def run() -> None:
        database, blobs = Database(stack.database_url), Blobs(stack.environment()["BLOB_URL"])
        table = voice_recordings
        with database.transaction() as connection:
            for row in connection.execute(select(table).where(table.c.clear_at.is_not(None))).all():
                change = update(table).where(table.c.id == row.id)
                connection.execute(change.values(clear_at=row.clear_at - later))
        while (await delete_ended_recordings(database, blobs)).more:
            pass
        await database.close()

    asyncio.run(run())


def test_voice_interrupted_by_a_gateway_crash_is_deleted_later(stack: Stack) -> None:
    caller = stack.caller()
    consent_id = keep_consent(caller)
    stack.kill("gateway")
    stack.start_gateway(failpoint="voice_stored")
    with contextlib.suppress(httpx.HTTPError):
        keep_voice(caller, consent_id)
    stack.processes.pop("gateway").wait(timeout=20)
    assert len(lying(stack, caller)) == 2

    stack.start_gateway()

    assert caller.http.get("/v1/audio/voices").json()["data"] == []
    kept = keep_voice(caller, consent_id)
    assert caller.http.get(f"/v1/audio/voices/{kept['id']}").json() == kept
    clear(stack, later=timedelta())
    assert len(lying(stack, caller)) == 3, "whoever stores it may still be about to keep it"
    clear(stack, later=timedelta(minutes=16))
    assert lying(stack, caller) == {consent_id, kept["id"]}


def test_withdrawn_consent_and_voice_are_deleted_after_a_gateway_crash(
    stack: Stack,
) -> None:
    caller = stack.caller()
    consent_id = keep_consent(caller)
    kept = keep_voice(caller, consent_id)
    stack.kill("gateway")
    stack.start_gateway()
    assert caller.http.get(f"/v1/audio/voices/{kept['id']}").json() == kept
    stack.kill("gateway")
    stack.start_gateway(failpoint="voice_ended")
    with contextlib.suppress(httpx.HTTPError):
        caller.http.delete(f"/v1/audio/voice_consents/{consent_id}")
    stack.processes.pop("gateway").wait(timeout=20)
    assert lying(stack, caller) == {consent_id, kept["id"]}

    stack.start_gateway()

    for path in (f"voices/{kept['id']}", f"voice_consents/{consent_id}"):
        assert caller.http.get(f"/v1/audio/{path}").status_code == 404
    clear(stack, later=timedelta())
    assert lying(stack, caller) == set()


CLONE = """\
  - name: clone
    task: voice-clone
    engine: echo
    price: [{unit: character, amount: "0.001"}]
"""


@pytest.fixture
def cloning(tmp_path: Path, postgres: str) -> Iterator[Stack]:
    with own_stack(tmp_path, postgres, more_models=CLONE) as made:
        yield made


def test_request_whose_voice_was_deleted_before_its_start_is_not_charged(cloning: Stack) -> None:
    caller = cloning.caller()
    kept = keep_voice(caller, keep_consent(caller))
    cloning.kill("worker")
    body = {"model": "clone", "input": {"text": "Good morning!", "voice": kept["id"]}}
    made = caller.http.post("/v1/requests", json=body)
    assert made.status_code == 202, made.text
    assert cloning.held(caller) > 0

    assert caller.http.delete(f"/v1/audio/voices/{kept['id']}").is_success
    cloning.start_worker()

    found = ended(caller, made.json()["id"], patience_s=100)
    assert (found["status"], found["cost"]) == ("failed", "0")
    assert found["error"]["code"] == "invalid_input"
    assert "does not exist" in found["error"]["message"]
    assert cloning.held(caller) == 0
    assert cloning.findings() == []
