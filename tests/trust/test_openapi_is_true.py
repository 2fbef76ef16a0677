"""The OpenAPI document describes what the running gateway answers."""

from __future__ import annotations

import importlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

import httpx
import pytest
import schemathesis

from gateway.api.http.schemas import Schemas
from gateway.app import create_app
from gateway.settings import Settings
from tests.databases import Databases
from tests.stack import Stack, chat, ended, order, running

EXCLUDED = {
    "positive_data_acceptance": "names of models, accounts and files are valid and do not exist",
    "use_after_free": "a revoked key and a cancelled request can be read",
    "ensure_resource_availability": "the path of a new key is not that of any route",
}
"""Checks that are wrong about this API, and why."""


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("openapi")
    url = Databases("sqlite", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture
def stack(gateway: Stack) -> Iterator[Stack]:
    yield gateway
    gateway.close_clients()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scopes", "phases"),
    [
        pytest.param(("inference", "read"), "examples,coverage,fuzzing", marks=pytest.mark.long),
        pytest.param(
            ("inference", "read", "admin"), "examples,coverage,fuzzing", marks=pytest.mark.long
        ),
        (("inference", "read", "admin"), "examples,fuzzing"),
    ],
)
def test_schemathesis_finds_nothing(
    stack: Stack, tmp_path: Path, scopes: tuple[str, ...], phases: str
) -> None:
    caller = stack.caller(credit="1000", scopes=scopes)
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{stack.url}/schema/openapi.json",
        "--header",
        f"Authorization: Bearer {caller.secret}",
        f"--phases={phases}",
        "--max-examples=3",
        "--seed=7",
        "--generation-deterministic",
        "--checks=all",
        f"--exclude-checks={','.join(EXCLUDED)}",
        "--no-shrink",
        "--request-timeout=60",
        "--suppress-health-check=all",
        "--warnings=off",
        "--no-color",
        "--workers=1",
    ]

    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2_000:]


def test_every_answer_of_a_request_is_as_declared(stack: Stack) -> None:
    caller = stack.caller(credit="1", scopes=("inference", "read", "admin"))
    declared = schemathesis.openapi.from_url(f"{stack.url}/schema/openapi.json")

    def check(method: str, path: str, body: Any = None, **parts: str) -> Any:
        answer = caller.http.request(method, path.format(**parts), json=body)
        assert answer.is_success, answer.text
        declared[path.partition("?")[0]][method].validate_response(answer)
        return answer.json()

    logprobs = {"logprobs": True, "top_logprobs": 2, "n": 2}
    check("POST", "/v1/chat/completions", chat("echo", "a b", **logprobs))
    check("POST", "/v1/completions", {"model": "echo", "prompt": "a b", "logprobs": 1})
    made = check("POST", "/v1/responses", {"model": "echo", "input": "a b"})
    check("GET", "/v1/responses/{id}", id=made["id"])
    check("POST", "/v1/quote", {"model": "echo", "input": {"prompt": "a b"}})
    asked = {"model": "echo", "input": {"prompt": "a b"}}
    request_id = check("POST", "/v1/requests", asked)["id"]
    ended(caller, request_id)
    check("GET", "/v1/requests/{request_id}", request_id=request_id)
    check("GET", "/v1/requests/{request_id}/receipt", request_id=request_id)
    refund = {"amount": "0.000000001", "reason": "a"}
    check("POST", "/v1/admin/requests/{request_id}/refund", refund, request_id=request_id)
    check("GET", "/v1/requests/{request_id}/receipt", request_id=request_id)
    check("GET", "/v1/generation?id=" + request_id)
    failed = order(caller, "echo", "!fail")
    ended(caller, failed)
    check("GET", "/v1/requests/{request_id}", request_id=failed)
    for path in (
        "/v1/admin/requests", "/v1/admin/usage", "/v1/balance", "/v1/catalog", "/v1/key",
        "/v1/ledger", "/v1/models", "/v1/requests", "/v1/requests/summary", "/v1/statements",
        "/v1/usage",
    ):  # fmt: skip
        check("GET", path)
    check("GET", "/v1/models/{name}", name="echo/endpoints")


def test_generated_client_reads_a_chat_a_receipt_and_an_error(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "openapi.json"
    document.write_bytes(httpx.get(f"{stack.url}/schema/openapi.json", timeout=60).content)
    settings = tmp_path / "generator.yaml"
    settings.write_text("post_hooks: []\n")
    made = subprocess.run(
        [
            str(Path(sys.executable).with_name("openapi-python-client")),
            "generate",
            f"--path={document}",
            f"--config={settings}",
            "--meta=none",
            f"--output-path={tmp_path / 'tollgate_client'}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    # It leaves out what it cannot read, and says so.
    assert "warning" not in made.stdout.lower(), made.stdout

    monkeypatch.syspath_prepend(tmp_path)
    client = importlib.import_module("tollgate_client.client")
    models = importlib.import_module("tollgate_client.models")
    chats = importlib.import_module("tollgate_client.api.open_ai.create_chat_completion")
    receipts = importlib.import_module("tollgate_client.api.requests.get_receipt")
    caller = stack.caller(credit="1")
    with client.AuthenticatedClient(base_url=stack.url, token=caller.secret) as connection:
        body = models.ChatCompletion.from_dict(chat("echo", "hello there"))
        said = chats.sync(client=connection, body=body)
        receipt = receipts.sync(said.id, client=connection)
        missing = receipts.sync("req_1", client=connection)

    assert said.choices[0].message.content == "hello there"
    assert said.usage.prompt_tokens == receipt.usage.input_tokens
    assert receipt.cost == f"{said.usage.cost:.7f}"
    assert sum(line.quantity for line in receipt.lines) == said.usage.total_tokens
    assert isinstance(missing, models.OpenAIError)
    assert missing.error.code == "request_not_found"


def test_each_operation_declares_its_answer_and_its_errors(tmp_path: Path) -> None:
    document = create_app(Settings(home=tmp_path)).openapi_schema.to_schema()

    for path, item in document["paths"].items():
        for method, operation in item.items():
            place = f"{method} {path}"
            answers = operation["responses"]
            assert "400" in answers, place
            if operation.get("security") != []:
                signed = path.startswith(("/v1/blobs", "/v1/uploads/"))
                assert {"401", "403"} <= answers.keys() or signed, place
            for status, answer in answers.items():
                if method != "head":
                    schemas = [each["schema"] for each in answer["content"].values()]
                    assert all(schemas), f"{place} {status}"
    assert "cost" in document["components"]["schemas"]["ReceiptView"]["required"]


def test_types_that_answers_are_declared_with() -> None:
    schemas = Schemas()

    assert schemas.of(_Page[_Item]) == {"$ref": "#/components/schemas/_Item_Page"}
    assert schemas.components["_Item_Page"] == {
        "title": "_Item_Page",
        "description": "A part of a list.",
        "type": "object",
        "properties": {
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/_Item"}},
            "more": {"type": "boolean"},
        },
        "required": ["data"],
    }
    assert schemas.components["_Item"]["required"] == ["kind"]
    assert schemas.components["_Item"]["properties"] == {
        "kind": {"type": "string", "const": "item"},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tags": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    with pytest.raises(TypeError):
        schemas.of(Path)


Element = TypeVar("Element")


class _List(TypedDict, Generic[Element]):
    data: list[Element]


class _Page(_List[Element]):
    """A part of a list."""

    more: NotRequired[bool]


class _Sized(TypedDict, total=False):
    size: int | None
    tags: dict[str, str]


class _Item(_Sized):
    kind: Literal["item"]
