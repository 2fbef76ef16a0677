"""No account can fill the disk: files are limited, counted, and refused below the reserve."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from sqlalchemy import insert, update

from gateway.accounts.accounts import create_account
from gateway.errors import TollgateError
from gateway.files.room import StorageLimits, StorageUse, measure, reserve, set_limits
from gateway.sql.database import Database
from gateway.tables.batches import file_reservations
from gateway.tables.core import accounts
from tests.artist import png
from tests.databases import Databases
from tests.stack import Caller, Stack, chat, running

CONTENT = b'{"custom_id": "a"}\n'
PICTURE = png(8, 8)
FILES_MAX = 4
BYTES_MAX = 1_000_000


@pytest.fixture(scope="module")
def bounded(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """Accounts here keep four files, and a megabyte in all."""
    directory = tmp_path_factory.mktemp("bounded")
    url = Databases("sqlite", directory, postgres).make()
    stack = running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}")
    with stack as made:
        made.kill("gateway")
        made.start_gateway(
            environment={
                "TOLLGATE_ACCOUNT_FILES_MAX": str(FILES_MAX),
                "TOLLGATE_ACCOUNT_FILE_BYTES_MAX": str(BYTES_MAX),
                "TOLLGATE_MEDIA_BYTES_MAX": "200000",
            }
        )
        yield made


def upload(caller: Caller, content: bytes = CONTENT) -> httpx.Response:
    return caller.http.post("/v1/files", files={"file": content}, data={"purpose": "batch"})


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def suspend(stack: Stack, caller: Caller) -> None:
    database = Database(stack.database_url)
    with database.transaction() as connection:
        connection.execute(
            update(accounts).where(accounts.c.id == caller.account_id).values(status="suspended")
        )
    database.dispose()


def writes(caller: Caller) -> list[httpx.Response]:
    """One call of each route that leaves something here."""
    post = caller.http.post
    batch = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    recording = {"recording": b"RIFF"}
    return [
        upload(caller),
        post("/v1/uploads", content=PICTURE),
        post("/api/v1/ie/requestqueue/apikey/upload-url", json={"file_type": "png"}),
        post("/v1/batches", json=batch),
        post("/v1/audio/voice_consents", files=recording, data={"name": "a", "language": "en"}),
        post("/v1/audio/voices", files={"audio_sample": b"RIFF"}, data={"name": "a"}),
    ]


def test_account_without_balance_or_credit_limit_can_store_nothing(bounded: Stack) -> None:
    caller = bounded.caller(credit="0")

    answers = writes(caller)

    assert {answer.status_code for answer in answers} == {402}
    assert error(answers[0]) == (402, "insufficient_credit")
    assert caller.http.get("/v1/storage").json()["files"] == 0


def test_suspended_account_can_store_nothing(bounded: Stack) -> None:
    caller = bounded.caller()
    suspend(bounded, caller)

    answers = writes(caller)

    assert {answer.status_code for answer in answers} == {403}
    assert error(answers[0]) == (403, "account_suspended")


def test_uploads_count_in_the_requests_per_minute(bounded: Stack) -> None:
    caller = bounded.caller(requests_per_minute=2)

    assert upload(caller).is_success
    assert caller.http.post("/v1/uploads", content=PICTURE).is_success
    refused = upload(caller)

    assert error(refused) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 0


def test_files_are_bounded_in_number_and_a_deleted_one_makes_room(bounded: Stack) -> None:
    caller = bounded.caller()
    kept = [upload(caller).json()["id"] for _ in range(FILES_MAX)]

    refused = upload(caller)
    assert error(refused) == (413, "too_many_files")
    assert refused.json()["error"]["limit"] == FILES_MAX
    caller.http.delete(f"/v1/files/{kept[0]}").raise_for_status()

    assert upload(caller).is_success


def test_files_are_bounded_in_bytes_before_they_are_read(bounded: Stack) -> None:
    caller = bounded.caller()
    assert upload(caller, b"x" * 600_000).is_success

    refused = upload(caller, b"x" * 600_000)

    assert error(refused) == (413, "account_storage_full")
    shown = caller.http.get("/v1/storage").json()
    assert (shown["files"], shown["bytes"], shown["bytes_max"]) == (1, 600_000, BYTES_MAX)


def test_upload_urls_count_before_their_files_arrive(bounded: Stack) -> None:
    caller = bounded.caller()
    path = "/api/v1/ie/requestqueue/apikey/upload-url"
    made = [caller.http.post(path, json={"file_type": "png"}) for _ in range(FILES_MAX + 1)]

    assert [answer.status_code for answer in made] == [200] * FILES_MAX + [413]
    filled = httpx.put(
        made[0].json()["upload_url"], content=PICTURE, headers={"Content-Type": "image/png"}
    )
    assert filled.is_success
    again = httpx.put(
        made[0].json()["upload_url"], content=PICTURE, headers={"Content-Type": "image/png"}
    )
    assert again.json()["id"] == filled.json()["id"]
    shown = caller.http.get("/v1/storage").json()
    assert shown["files"] == FILES_MAX
    assert shown["bytes"] == len(PICTURE) + (FILES_MAX - 1) * 200_000


def test_concurrent_uploads_stay_within_the_limit_together(bounded: Stack) -> None:
    caller = bounded.caller()
    statuses = []

    def send() -> None:
        with httpx.Client(base_url=bounded.url, headers=caller.http.headers, timeout=30) as http:
            answer = http.post("/v1/files", files={"file": CONTENT}, data={"purpose": "batch"})
            statuses.append(answer.status_code)

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [200] * FILES_MAX + [413] * (12 - FILES_MAX)


def test_administrator_sets_bounds_of_one_account(bounded: Stack) -> None:
    caller, admin = bounded.caller(), bounded.caller(scopes=("admin", "read"))

    answer = admin.http.put(
        "/v1/admin/storage-limits", json={"account": caller.account_id, "files": 1}
    )

    assert answer.is_success, answer.text
    assert (answer.json()["files_max"], answer.json()["bytes_max"]) == (1, BYTES_MAX)
    assert upload(caller).is_success
    assert error(upload(caller)) == (413, "too_many_files")
    refused = caller.http.put("/v1/admin/storage-limits", json={"account": caller.account_id})
    assert refused.status_code == 403


def test_no_file_is_taken_below_the_reserve_and_requests_are_served(bounded: Stack) -> None:
    caller = bounded.caller()
    bounded.kill("gateway")
    # A reserve that no disk has.
    bounded.start_gateway(environment={"TOLLGATE_DISK_RESERVE_BYTES": str(2**60)}, wait=False)
    try:
        refused = upload(caller)
        assert error(refused) == (503, "storage_full")
        assert "retry-after" in refused.headers
        assert caller.http.post("/v1/uploads", content=PICTURE).status_code == 503
        said = caller.http.post("/v1/chat/completions", json=chat("echo", "hello"))
        assert said.json()["choices"][0]["message"]["content"] == "hello"
    finally:
        bounded.kill("gateway")
        bounded.start_gateway()
    assert upload(caller).is_success


def test_reservation_expires_if_its_file_never_arrives(database: Database) -> None:
    defaults = StorageLimits(files_max=1, bytes_max=1000)
    with database.transaction() as connection:
        account = create_account(connection, "a", credit_limit_nanos=1)
        connection.execute(
            insert(file_reservations).values(
                file_id="file-1",
                account_id=account.id,
                bytes=900,
                expires_at=datetime.now(UTC) - timedelta(seconds=1),
            )
        )

        reserve(connection, account.id, "file-2", defaults, size=900)
        assert measure(connection, account.id) == StorageUse(1, 900)
        with pytest.raises(TollgateError) as caught:
            reserve(connection, account.id, "file-3", defaults, size=1)
        assert caught.value.code == "too_many_files"
        set_limits(connection, account.id, files_max=2, bytes_max=None)
        with pytest.raises(TollgateError) as caught:
            reserve(connection, account.id, "file-3", defaults, size=101)
        assert caught.value.code == "account_storage_full"
        reserve(connection, account.id, "file-3", defaults, size=100)
