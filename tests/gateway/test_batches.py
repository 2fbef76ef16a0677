"""Batches by the unmodified OpenAI client: half price, exact charges, result files."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import numpy as np
import openai
import pytest

from tests.stack import Caller, Stack, chat, wait_for

WORDS = "hello big world"
COST = Decimal("0.00000015")
"""Half of three tokens in at $0.02 and three out at $0.08 a million."""


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def line(custom_id: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**asked, **changes}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def submit(api: openai.OpenAI, content: bytes, **more: Any) -> Any:
    """Upload a file and make a batch of it."""
    file = api.files.create(file=("lines.jsonl", content), purpose="batch")
    return api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **more,
    )


def ended(api: openai.OpenAI, batch_id: str) -> Any:
    """Wait for the end of a batch."""
    found: list[Any] = []

    def closed() -> bool:
        found[:] = [api.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "cancelled", "expired")

    wait_for(closed, batch_id)
    return found[0]


def results(api: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Read a file of results: custom_id → line."""
    assert file_id is not None
    text = api.files.content(file_id).text
    lines = [json.loads(row, parse_float=Decimal) for row in text.splitlines()]
    return {each["custom_id"]: each for each in lines}


def test_a_batch_is_answered_as_live_requests_are_at_half_the_price(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    live = caller.http.post("/v1/chat/completions", json=chat("echo", WORDS)).json()

    made = submit(
        api,
        jsonl(*(line(f"line {n}", chat("echo", WORDS)) for n in range(5))),
        metadata={"project": "demo"},
    )

    assert made.status == "validating"
    batch = ended(api, made.id)
    assert batch.status == "completed"
    assert batch.metadata == {"project": "demo"}
    assert batch.model == "echo"
    assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
    assert batch.usage.total_tokens == 30
    assert batch.error_file_id is None
    found = results(api, batch.output_file_id)
    assert list(found) == [f"line {n}" for n in range(5)]
    response = found["line 3"]["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["usage"]["cost"] == COST
    assert body["id"] == response["request_id"]
    changed = ("id", "created", "usage")
    assert {**body, **dict.fromkeys(changed)} == {**live, **dict.fromkeys(changed)}
    receipt = caller.http.get(f"/v1/requests/{response['request_id']}/receipt").json()
    assert receipt["service_class"] == "batch"
    assert Decimal(receipt["cost"]) == COST == sum(Decimal(x["amount"]) for x in receipt["lines"])
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == 1 - 2 * COST - 5 * COST
    assert balance["held"] == "0"
    assert stack.findings() == []


def test_batches_have_no_slo(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    made = submit(api, jsonl(line("a", chat("slow", "a b"))))

    (found,) = results(api, ended(api, made.id).output_file_id).values()

    request_id = found["response"]["request_id"]
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert receipt["performance"]["slo"] is None
    assert receipt["performance"]["ttft_ms"] > 0


def test_catalog_has_the_batch_price(stack: Stack) -> None:
    http = stack.caller().http

    sold = http.get("/v1/catalog/echo").json()["batch"]

    assert sold["discount"] == "0.5"
    assert [line["amount"] for line in sold["price"]] == ["0.01", "0.04"]
    assert http.get("/v1/catalog/brief").json()["batch"] is None


def test_quote_has_the_maximum_cost_of_a_line(stack: Stack) -> None:
    http = stack.caller().http
    body = chat("echo", WORDS, max_tokens=4)

    live, batch = (
        http.post("/v1/quote", json={**body, **more}).json()
        for more in ({}, {"service_class": "batch"})
    )

    assert Decimal(batch["max_cost"]) == Decimal(live["max_cost"]) / 2
    assert (live["service_class"], batch["service_class"]) == ("standard", "batch")
    unsold = http.post("/v1/quote", json={**chat("brief", WORDS), "service_class": "batch"})
    assert unsold.json()["error"]["code"] == "model_not_in_batches"
    unknown = http.post("/v1/quote", json={**body, "service_class": "first"})
    assert unknown.json()["error"]["param"] == "service_class"


def test_file_with_errors_fails_and_is_not_charged(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    good = chat("echo", WORDS)

    made = submit(
        api,
        b"\n".join(
            [
                json.dumps(line("a", good)).encode(),
                b"",
                b"{not json",
                b'["a list"]',
                json.dumps(line("a", good)).encode(),
                json.dumps(line("b", good, method="GET")).encode(),
                json.dumps(line("c", good, url="/v1/embeddings")).encode(),
                json.dumps(line("d", chat("nobody", WORDS))).encode(),
                json.dumps(line("e", {"model": "echo"})).encode(),
                json.dumps(line("f", chat("echo", WORDS, max_tokens=100_000))).encode(),
                json.dumps(line("g", chat("echo", WORDS, stream=True))).encode(),
                json.dumps(line("h", chat("brief", WORDS))).encode(),
                json.dumps(line("", good)).encode(),
                json.dumps({"custom_id": "i", "method": "POST", "body": good}).encode(),
            ]
        ),
    )

    batch = ended(api, made.id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (3, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_value", "method"),
        (7, "mismatched_url", "url"),
        (8, "model_not_found", "body.model"),
        (9, "missing_required_parameter", "body.messages"),
        (10, "invalid_value", "body.max_tokens"),
        (11, "unsupported_parameter", "body.stream"),
        (12, "model_not_in_batches", "body.model"),
        (13, "invalid_value", "custom_id"),
        (14, "missing_required_parameter", "url"),
    ]
    assert batch.output_file_id is None
    assert batch.error_file_id is None
    assert caller.http.get("/v1/requests").json()["data"] == []
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def test_a_file_with_too_many_lines_or_none_fails(stack: Stack) -> None:
    api = client(stack, stack.caller())
    many = jsonl(*(line(str(n), chat("echo", "a")) for n in range(1001)))

    found = [ended(api, submit(api, content).id) for content in (many, b"\n\n")]

    codes = [batch.errors.data[0].code for batch in found]
    assert codes == ["too_many_lines", "empty_file"]


def test_failed_line_is_in_the_error_file_and_is_free(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    lines = [line("good", chat("echo", WORDS)), line("bad", chat("slow", "!fail"))]

    batch = ended(api, submit(api, jsonl(*lines)).id)

    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert set(results(api, batch.output_file_id)) == {"good"}
    bad = results(api, batch.error_file_id)["bad"]
    assert bad["response"]["status_code"] == 424
    assert bad["response"]["body"]["error"]["code"] == bad["error"]["code"] == "engine_error"
    receipt = caller.http.get(f"/v1/requests/{bad['response']['request_id']}/receipt").json()
    assert (receipt["cost"], receipt["service_class"]) == ("0", "batch")
    assert Decimal(caller.http.get("/v1/balance").json()["posted"]) == 1 - COST


def test_batch_continues_when_credit_runs_out_and_other_lines_fail(stack: Stack) -> None:
    # Three input tokens are held as 21 or more, so some of the concurrent lines are refused.
    caller = stack.caller(credit="0.00003")
    api = client(stack, caller)
    dear = chat("echo", WORDS, max_tokens=400)
    lines = [line(str(n), dear if n == 2 else chat("echo", WORDS, max_tokens=4)) for n in range(6)]
    lines[2]["body"]["n"] = 4

    batch = ended(api, submit(api, jsonl(*lines)).id)

    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 1)
    failed = results(api, batch.error_file_id)["2"]
    assert failed["response"]["status_code"] == 402
    assert failed["response"]["request_id"] is None
    assert failed["error"]["code"] == "insufficient_credit"
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == Decimal("0.00003") - 5 * COST
    assert balance["held"] == "0"
    assert stack.findings() == []


def test_cancelled_batch_keeps_results_and_charges_nothing_else(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    lines = [line("first", chat("echo", WORDS))]
    lines += [line(str(n), chat("slow", "word " * 200)) for n in range(8)]
    made = submit(api, jsonl(*lines))
    wait_for(lambda: api.batches.retrieve(made.id).request_counts.completed == 1, "one line")

    cancelling = api.batches.cancel(made.id)

    assert cancelling.status in ("cancelling", "cancelled")
    assert api.batches.cancel(made.id).id == made.id
    batch = ended(api, made.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 8)
    assert set(results(api, batch.output_file_id)) == {"first"}
    rest = results(api, batch.error_file_id)
    assert {row["error"]["code"] for row in rest.values()} == {"batch_cancelled"}
    assert {row["response"] for row in rest.values()} == {None}
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == 1 - COST
    assert balance["held"] == "0"
    assert stack.findings() == []


def test_ended_batch_cannot_be_cancelled(stack: Stack) -> None:
    api = client(stack, stack.caller())
    made = ended(api, submit(api, jsonl(line("a", chat("echo", "a")))).id)

    with pytest.raises(openai.ConflictError) as caught:
        api.batches.cancel(made.id)

    assert caught.value.code == "batch_not_cancellable"


def test_a_file_that_a_batch_needs_cannot_be_deleted_until_it_has_ended(stack: Stack) -> None:
    api = client(stack, stack.caller())
    made = submit(api, jsonl(line("a", chat("slow", "word " * 40))))

    with pytest.raises(openai.ConflictError) as caught:
        api.files.delete(made.input_file_id)

    assert caught.value.code == "file_in_use"
    batch = ended(api, made.id)
    assert batch.status == "completed"
    assert api.files.delete(made.input_file_id).deleted
    assert set(results(api, batch.output_file_id)) == {"a"}


def test_result_files_expire_as_requested_and_are_no_batch_input(stack: Stack) -> None:
    api = client(stack, stack.caller())

    batch = ended(
        api,
        submit(
            api,
            jsonl(line("a", chat("echo", "a"))),
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        ).id,
    )

    file = api.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    assert file.filename == f"{batch.id}_output.jsonl"
    assert file.expires_at == file.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        api.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )


def test_batches_are_private_to_the_account_and_listed_in_pages(stack: Stack) -> None:
    api, other = client(stack, stack.caller()), client(stack, stack.caller())
    content = jsonl(line("a", chat("echo", "a")))
    made = [submit(api, content).id for _ in range(3)]

    assert [batch.id for batch in api.batches.list(limit=2)] == made[::-1]
    assert [batch.id for batch in api.batches.list(after=made[1]).data] == [made[0]]
    assert other.batches.list().data == []
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made[0])
        assert caught.value.code == "batch_not_found"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"colour": "red"}, "colour"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_a_batch_of_another_kind_is_refused_by_name(
    changes: dict[str, Any], param: str | None, stack: Stack
) -> None:
    body = {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }

    answer = stack.caller().http.post("/v1/batches", json={**body, **changes})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (param, "output_expires_after.seconds")


def test_batch_request_repeated_after_a_disconnect_is_not_duplicated(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    made = submit(api, jsonl(line("a", chat("echo", "a"))))
    body = {
        "input_file_id": made.input_file_id,
        "endpoint": made.endpoint,
        "completion_window": "24h",
    }
    retry = {"X-Stainless-Retry-Count": "1"}

    again = caller.http.post("/v1/batches", json=body, headers=retry).json()
    other = caller.http.post(
        "/v1/batches", json={**body, "metadata": {"a": "b"}}, headers=retry
    ).json()
    anew = caller.http.post("/v1/batches", json=body).json()

    assert again["id"] == made.id
    assert len({made.id, other["id"], anew["id"]}) == 3


def test_requests_of_a_batch_are_found_by_it_and_count_against_no_limit_per_minute(
    stack: Stack,
) -> None:
    caller = stack.caller(requests_per_minute=3)
    # Uploading the file and creating the batch count, as one request each; its lines do not.
    api = client(stack, caller)

    batch = ended(
        api,
        submit(
            api, jsonl(*(line(f"c{n}", chat("echo", "a", metadata={"x": "y"})) for n in range(4)))
        ).id,
    )

    assert batch.request_counts.completed == 4
    page = caller.http.get(f"/v1/requests?tag:batch_id={batch.id}").json()["data"]
    assert sorted(found["metadata"]["custom_id"] for found in page) == ["c0", "c1", "c2", "c3"]
    assert {found["metadata"]["x"] for found in page} == {"y"}
    assert caller.http.post("/v1/chat/completions", json=chat("echo", "a")).is_success


def test_a_budget_bounds_a_batch_too(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    admin = stack.caller(scopes=("admin", "read"))
    made = admin.http.post(
        "/v1/admin/budgets",
        json={"account": caller.account_id, "limit": "0", "window": "total", "hard": True},
    )
    assert made.is_success, made.text

    batch = ended(api, submit(api, jsonl(line("a", chat("echo", "a")))).id)

    assert batch.status == "completed"
    assert results(api, batch.error_file_id)["a"]["error"]["code"] == "budget_exceeded"


def test_lines_wait_for_credit_that_other_requests_only_hold(stack: Stack) -> None:
    # A line holds $0.00000111, so two can run concurrently; it costs far less.
    caller = stack.caller(credit="0.0000025")
    api = client(stack, caller)
    body = chat("echo", WORDS, max_tokens=4)

    batch = ended(api, submit(api, jsonl(*(line(str(n), body) for n in range(6)))).id)

    assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 0)
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == Decimal("0.0000025") - 6 * COST


@pytest.mark.parametrize("path", ["files", "batches"])
def test_malformed_id_is_not_found(path: str, stack: Stack) -> None:
    http = stack.caller().http

    for unknown in ("x", f"batch_{'0' * 32}", f"file-{'0' * 32}"):
        assert http.get(f"/v1/{path}/{unknown}").status_code == 404
    assert http.get("/v1/files?purpose=none").json()["data"] == []


def _take_vectors(answer: dict[str, Any]) -> list[list[float]]:
    """Remove the vectors from an answer of embeddings."""
    return [_vector(each.pop("embedding")) for each in answer.get("data", ())]


def _vector(embedding: str | list[Decimal]) -> list[float]:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), np.float32).tolist()
    return [float(each) for each in embedding]


@pytest.mark.parametrize(
    ("path", "body", "changing"),
    [
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "the fox", "max_tokens": 4, "seed": 1},
            ("id", "created", "usage"),
        ),
        ("/v1/embeddings", {"model": "tiny-embed", "input": ["the fox", "a dog"]}, ("usage",)),
        (
            "/v1/embeddings",
            {"model": "tiny-embed", "input": "a dog", "encoding_format": "base64"},
            ("usage",),
        ),
        (
            "/v1/responses",
            {
                "model": "tiny",
                "input": "the fox",
                "max_output_tokens": 4,
                "temperature": 0,
                "metadata": {"a": "b"},
            },
            ("id", "created_at", "completed_at", "usage", "output"),
        ),
    ],
)
def test_every_text_endpoint_runs_in_batches_at_half_the_price(
    path: str, body: dict[str, Any], changing: tuple[str, ...], text_stack: Stack
) -> None:
    caller = text_stack.caller()
    api = client(text_stack, caller)
    live = caller.http.post(path, json=body)
    file = api.files.create(file=jsonl(line("a", body, url=path)), purpose="batch")

    batch = ended(
        api,
        api.batches.create(
            input_file_id=file.id,
            endpoint=path,  # type: ignore[arg-type]  # by parameter
            completion_window="24h",
        ).id,
    )

    assert batch.status == "completed", batch.errors
    answer = results(api, batch.output_file_id)["a"]["response"]["body"]
    told = json.loads(live.text, parse_float=Decimal)
    assert answer.keys() == told.keys()
    for vector, other in zip(_take_vectors(answer), _take_vectors(told), strict=True):
        # Batches of other sizes may round the last bit another way.
        assert vector == pytest.approx(other, abs=1e-5)
    for name in answer.keys() - set(changing):
        assert answer[name] == told[name]
    if "output" in told:
        assert [part["text"] for part in answer["output"][0]["content"]] == [
            part["text"] for part in told["output"][0]["content"]
        ]
    request_id = results(api, batch.output_file_id)["a"]["response"]["request_id"]
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert receipt["service_class"] == "batch"
    # The prompt may come from the prefix cache the second time, at a price of its own.
    for paid in receipt["lines"]:
        assert Decimal(paid["amount"]) > 0
    assert Decimal(receipt["cost"]) <= Decimal(live.headers["x-request-cost"]) / 2 + Decimal("1e-9")
    assert text_stack.findings() == []


def test_unstored_response_is_only_in_the_output_file(text_stack: Stack) -> None:
    caller = text_stack.caller()
    api = client(text_stack, caller)
    body = {"model": "tiny", "input": "the fox", "max_output_tokens": 4}
    lines = [
        line(name, {**body, "store": name == "kept"}, url="/v1/responses")
        for name in ("kept", "forgotten")
    ]
    file = api.files.create(file=jsonl(*lines), purpose="batch")

    batch = ended(
        api,
        api.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        ).id,
    )

    found = results(api, batch.output_file_id)
    assert found["forgotten"]["response"]["body"]["output"]
    statuses = {
        name: caller.http.get(f"/v1/responses/{row['response']['body']['id']}").status_code
        for name, row in found.items()
    }
    assert statuses == {"kept": 200, "forgotten": 404}
