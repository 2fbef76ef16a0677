"""Files by the unmodified OpenAI client: privacy, expiry and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import openai
import pytest

from gateway.accounts.accounts import create_account
from gateway.errors import NotFound
from gateway.files.store import Files
from gateway.sql.database import Database
from tests.artist import png
from tests.stack import FILE_BYTES_MAX, Caller, Stack
from workers.contract.blobs import Blobs

CONTENT = b'{"custom_id": "a"}\n'


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


@pytest.mark.parametrize("purpose", ["batch", "user_data"])
@pytest.mark.parametrize(
    "name",
    ["a\x1b[2J.jsonl", "a\u202egnp.jsonl", "a" * 250 + ".jsonl"],
    ids=["escape", "turned", "long"],
)
def test_a_file_name_that_is_too_long_or_has_control_characters_is_refused(
    stack: Stack, name: str, purpose: str
) -> None:
    caller = stack.caller()
    content = CONTENT if purpose == "batch" else png(4, 4)

    # As raw UTF-8: httpx escapes control characters, other clients do not.
    body = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
        + purpose.encode()
        + b"\r\n"
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n--x--\r\n"
    )
    answer = caller.http.post(
        "/v1/files",
        content=body,
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "file"
    assert "the name of the file" in answer.json()["error"]["message"]
    assert caller.http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("name", ["Screenshot 9.41\u202fAM.jsonl", "क्\u200dष.jsonl"])
def test_file_names_of_any_script_are_kept(stack: Stack, name: str) -> None:
    api = client(stack, stack.caller())

    assert api.files.create(file=(name, CONTENT), purpose="batch").filename == name


def test_file_is_stored_unchanged_until_it_is_deleted(stack: Stack) -> None:
    api = client(stack, stack.caller())

    made = api.files.create(file=("my lines.jsonl", CONTENT), purpose="batch")

    assert (made.object, made.bytes, made.purpose) == ("file", len(CONTENT), "batch")
    assert made.filename == "my lines.jsonl"
    assert made.expires_at == made.created_at + 30 * 86_400
    assert api.files.retrieve(made.id) == made
    assert api.files.content(made.id).content == CONTENT
    assert api.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.content(made.id)
    assert api.files.list().data == []


def test_file_expires_at_the_requested_time(stack: Stack) -> None:
    api = client(stack, stack.caller())

    made = api.files.create(
        file=CONTENT, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )

    assert made.expires_at == made.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="3600"):
        api.files.create(
            file=CONTENT, purpose="batch", expires_after={"anchor": "created_at", "seconds": 60}
        )


def test_files_are_private_to_the_account(stack: Stack) -> None:
    owner, other = client(stack, stack.caller()), client(stack, stack.caller())
    file_id = owner.files.create(file=CONTENT, purpose="batch").id

    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file_id)
        assert caught.value.code == "file_not_found"
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert other.files.list().data == []
    assert owner.files.content(file_id).content == CONTENT


def test_files_are_listed_in_pages(stack: Stack) -> None:
    api = client(stack, stack.caller())
    made = [api.files.create(file=CONTENT, purpose="batch").id for _ in range(5)]

    assert [file.id for file in api.files.list(limit=2)] == made[::-1]
    assert [file.id for file in api.files.list(limit=2, order="asc")] == made
    page = api.files.list(limit=2, after=made[3])
    assert ([file.id for file in page.data], page.has_more) == ([made[2], made[1]], True)
    assert api.files.list(purpose="batch_output").data == []
    assert len(api.files.list(purpose="batch").data) == 5
    with pytest.raises(openai.NotFoundError):
        api.files.list(after="file-none")


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "evals"])
def test_unsupported_purpose_is_refused(purpose: str, stack: Stack) -> None:
    api = client(stack, stack.caller())

    with pytest.raises(openai.BadRequestError) as caught:
        api.files.create(file=CONTENT, purpose=purpose)  # type: ignore[arg-type]  # by parameter

    assert (caught.value.code, caught.value.param) == ("unsupported_purpose", "purpose")


def test_type_of_an_uploaded_image_is_detected_from_its_bytes(stack: Stack) -> None:
    api = client(stack, stack.caller())

    made = api.files.create(file=("a.txt", png(4, 4)), purpose="vision")

    assert (made.purpose, api.files.content(made.id).content) == ("vision", png(4, 4))
    with pytest.raises(openai.BadRequestError) as caught:
        api.files.create(file=CONTENT, purpose="user_data")
    assert caught.value.code == "unsupported_media_type"


@pytest.mark.parametrize(
    ("form", "code", "param"),
    [
        ({"files": {"purpose": (None, b"batch")}}, "missing_required_parameter", "file"),
        ({"files": {"file": CONTENT}}, "missing_required_parameter", "purpose"),
        ({"files": {"file": CONTENT}, "data": {"purpose": "x"}}, "invalid_value", "purpose"),
        ({"files": {"file": b""}, "data": {"purpose": "batch"}}, "empty_file", "file"),
        (
            {"files": {"file": CONTENT}, "data": {"purpose": "batch", "colour": "red"}},
            "unknown_parameter",
            "colour",
        ),
        (
            {
                "files": {"file": CONTENT},
                "data": {"purpose": "batch", "expires_after[seconds]": "3600"},
            },
            "missing_required_parameter",
            "expires_after",
        ),
        (
            {"files": {"purpose": (None, b"batch"), "file": (None, b"no name")}},
            "invalid_value",
            "file",
        ),
    ],
)
def test_invalid_form_field_is_refused_by_name(
    form: dict[str, dict[str, object]], code: str, param: str, stack: Stack
) -> None:
    answer = stack.caller().http.post("/v1/files", **form)  # type: ignore[arg-type]  # as above

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["param"] == param


def test_file_can_exceed_other_bodies_but_not_its_limit(stack: Stack) -> None:
    api = client(stack, stack.caller())
    large = b"x" * FILE_BYTES_MAX

    made = api.files.create(file=large, purpose="batch")

    assert api.files.content(made.id).content == large
    for more in (1, 1_000_000):
        with pytest.raises(openai.APIStatusError) as caught:
            api.files.create(file=large + b"x" * more, purpose="batch")
        assert caught.value.status_code == 413
    assert [file.id for file in api.files.list()] == [made.id]


def test_read_only_key_cannot_upload(stack: Stack) -> None:
    caller = stack.caller(scopes=("read",))

    answer = caller.http.post("/v1/files", files={"file": CONTENT}, data={"purpose": "batch"})

    assert answer.status_code == 403


def test_body_that_is_not_a_form_is_refused(stack: Stack) -> None:
    answer: httpx.Response = stack.caller().http.post("/v1/files", json={"purpose": "batch"})

    assert answer.status_code == 400
    assert "multipart/form-data" in answer.json()["error"]["message"]


async def test_expired_files_are_hidden_and_deleted(database: Database, tmp_path: Path) -> None:
    files = Files(database, Blobs((tmp_path / "blobs").as_uri()))
    with database.transaction() as connection:
        account_id = create_account(connection, "a").id

    async def chunks() -> AsyncIterator[bytes]:
        yield CONTENT

    made = [
        await files.create(
            account_id,
            purpose="batch",
            filename="x",
            chunks=chunks(),
            kept_for=timedelta(hours=hours),
        )
        for hours in (-1, 1)
    ]

    assert [file.id for file in (await files.list(account_id, limit=10)).items] == [made[1].id]
    with pytest.raises(NotFound):
        await files.find(account_id, made[0].id)
    await files.delete_ended()
    left = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert [made[1].id in str(path) for path in left] == [True]
    with database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT id FROM files").scalars().all() == [made[1].id]
