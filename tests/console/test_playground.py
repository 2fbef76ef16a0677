"""Forms of the playground, what they send, and why they are refused."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.console.playground.beginnings import named_values, shared_address
from gateway.console.playground.chat import conversation
from gateway.console.playground.code import code_of, code_of_input
from gateway.console.playground.fields import fields_of, forms_of, read_input
from gateway.console.playground.orders import input_of
from gateway.console.playground.pages import NAMES
from gateway.console.playground.parts import FormName, task_of
from gateway.console.views.outputs import scores_text, transcript_text, vectors_text
from gateway.errors import InvalidRequest
from gateway.files.kept_inputs import KeptInput
from gateway.files.sources import SentSource
from gateway.tasks.registry import parse
from tests.console.visiting import FORM, Browser, Installation
from workers.contract.jobs import BlobRef

SHIPPED = Path(__file__).parents[2] / "catalog.yaml"
ORDER = "/console/playground/order"
QUOTE = "/console/playground/quote"
JSON = {**FORM, "Accept": "application/json"}


@pytest.fixture(scope="module")
def entries() -> Mapping[str, CatalogEntry]:
    return {entry.name: entry for entry in load_catalog(SHIPPED).models}


async def _nothing() -> Any:
    yield b""


def filled(entry: CatalogEntry, form: FormName) -> dict[str, Any]:
    """Fill every field of a form as a person could."""
    values: dict[str, Any] = {}
    for field in fields_of(entry, form):
        if field.kind == "file":
            values[field.name] = [SentSource(_nothing)]
        elif field.kind == "choice":
            if field.options:
                values[field.name] = field.options[0]
        elif field.kind == "number":
            values[field.name] = field.default or f"{field.least or 1:g}"
        else:
            values[field.name] = field.default or "en a circle"
    return values


def test_form_of_every_model_makes_an_input_that_its_task_reads(
    entries: Mapping[str, CatalogEntry],
) -> None:
    for entry in entries.values():
        for form in forms_of(entry):
            made = read_input(fields_of(entry, form), filled(entry, form))
            if entry.workflow is not None:
                assert set(made) == set(entry.workflow.inputs)
            elif form != "text-generation":
                parse(task_of(form), made)


def test_every_form_has_a_tab(entries: Mapping[str, CatalogEntry]) -> None:
    assert {form for entry in entries.values() for form in forms_of(entry)} <= set(NAMES)


def test_field_that_is_no_number_is_named(entries: Mapping[str, CatalogEntry]) -> None:
    fields = fields_of(entries["pocket-image"], "text-to-image")

    with pytest.raises(InvalidRequest) as refused:
        read_input(fields, {"prompt": "a circle", "n": "two"})

    assert refused.value.param == "n"
    assert "'two' is not a whole number" in refused.value.message


def test_conversation_has_tools_a_schema_and_earlier_messages(
    entries: Mapping[str, CatalogEntry],
) -> None:
    earlier = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    entered = {
        "message": "c",
        "system": "Be brief.",
        "stop": "END\r\n\r\nSTOP",
        "messages": earlier,
        "tools": '[{"name": "weather"}]',
        "schema": '{"type": "object"}',
    }

    made = input_of(entries["pocket-chat"], "text-generation", entered)

    assert [each["content"] for each in made["messages"]] == ["Be brief.", "a", "b", "c"]
    assert made["stop"] == ["END", "STOP"]
    assert made["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    assert made["response_format"]["json_schema"] == {
        "name": "answer",
        "schema": {"type": "object"},
    }
    parse("text-generation", made)


def test_texts_are_sent_as_they_were_written(entries: Mapping[str, CatalogEntry]) -> None:
    entered = {"prompt": " A hold\r\nis ", "stop": "\r\n ;\r\n\r\n", "max_tokens": " 3 "}

    made = input_of(entries["pocket-chat"], "text-completion", entered)

    assert made == {"prompt": " A hold\nis ", "stop": [" ;"], "max_tokens": 3}


def test_last_message_is_answered_again_without_a_new_one() -> None:
    asked = json.dumps([{"role": "user", "content": "a"}])

    assert len(conversation({}, asked)["messages"]) == 1
    for earlier in ("[]", json.dumps([{"role": "assistant", "content": "b"}])):
        with pytest.raises(InvalidRequest, match="Write a message"):
            conversation({}, earlier)


@pytest.mark.parametrize(
    ("field", "text"), [("tools", "{"), ("tools", "3"), ("schema", "[]"), ("schema", "{,}")]
)
def test_json_that_cannot_be_used_is_named(field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conversation({"message": "a", field: text}, "[]")

    assert refused.value.param == field


def test_pictures_follow_the_text_of_their_message() -> None:
    one, two = SentSource(_nothing, "1.png"), SentSource(_nothing, "2.png")

    made = conversation({"message": "Which is red?", "images": [one, two]}, "[]")
    code = code_of("http://127.0.0.1:8000", {"model": "m", "input": made})

    text, *pictures = made["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which is red?"}
    assert [each["image_url"]["url"] for each in pictures] == [one, two]
    parse("text-generation", made)
    assert "data:;base64,'$(base64 -w0 < 2.png)'" in code["curl"]
    assert 'data_uri("1.png")' in code["Python"]
    assert 'await dataUri("1.png")' in code["JavaScript"]
    ast.parse(code["Python"])


def test_code_reads_files_by_their_names() -> None:
    body = {
        "model": "m",
        "input": {"prompt": "file:\ufffdx", "image": SentSource(_nothing, "a b'.png")},
    }

    code = code_of("http://127.0.0.1:8000", body)

    assert "$(base64 -w0 < a_b_.png)" in code["curl"]
    assert 'data_uri("a_b_.png")' in code["Python"]
    assert 'dataUri("a_b_.png")' in code["JavaScript"]
    ast.parse(code["Python"])


def test_code_of_an_earlier_request_names_its_files() -> None:
    sent = BlobRef(key="a", content_type="image/png", bytes=1, sha256="0")
    kept = KeptInput(
        "pocket-image", "image-to-image", {"prompt": "a", "images": [{"attachment": 0}]}, [sent]
    )

    code = code_of_input("http://127.0.0.1:8000", kept)

    assert "$(base64 -w0 < sent-0.png)" in code["curl"]
    assert '"prompt": "a"' in code["curl"]
    ast.parse(code["Python"])


def test_shared_address_has_settings_and_no_contents(entries: Mapping[str, CatalogEntry]) -> None:
    entry = entries["pocket-image"]
    fields = fields_of(entry, "text-to-image")
    values = {"prompt": "a secret", "negative_prompt": "another", "n": "2", "quality": "high"}

    shared = parse_qs(urlsplit(shared_address(entry, "text-to-image", fields, values)).query)

    assert shared == {
        "model": ["pocket-image"], "task": ["text-to-image"], "n": ["2"], "quality": ["high"],
    }  # fmt: skip
    opened = {name: found[0] for name, found in shared.items()}
    assert named_values(fields, opened) == {"n": "2", "quality": "high"}


def test_only_own_outputs_are_carried_to_another_form(installation: Installation) -> None:
    browser = installation.visitor("member")

    for place in ("req_999/0", "req_999", "req_999/x", "//0"):
        form = {"model": "Veo3", "task": "text-to-video", "prompt": "a ship", "from-image": place}
        assert browser.post(QUOTE, form, headers=JSON).status_code in (200, 404)
        page = browser.get(f"/console/playground?model=Veo3&from-image={place}")
        assert page.status_code in (200, 404)


@pytest.mark.parametrize("missing", ["consent", "recording", "consent_recording", "name"])
def test_voice_is_not_stored_without_its_consent(installation: Installation, missing: str) -> None:
    browser = installation.visitor("owner")
    fields = {"name": "Ann", "language": "en", "consent": "yes"}
    files = {
        each: (f"{each}.wav", b"RIFF", "audio/wav") for each in ("recording", "consent_recording")
    }

    refused = browser.post(
        "/console/playground/voices",
        {name: value for name, value in fields.items() if name != missing},
        files={name: file for name, file in files.items() if name != missing},
    )

    assert refused.status_code == 400
    assert "microphone=(self)" in refused.headers["permissions-policy"]
    secret, _ = installation.key()
    for stored in ("voices", "voice_consents"):
        listed = installation.client.get(
            f"/v1/audio/{stored}", headers={"Authorization": f"Bearer {secret}"}
        )
        assert listed.json()["data"] == []


def test_only_owners_store_voices(installation: Installation) -> None:
    assert installation.visitor("member").get("/console/playground/voices").status_code == 404
    elsewhere = installation.visitor("owner").get("/console/playground")
    assert "microphone=()" in elsewhere.headers["permissions-policy"]


def test_code_sends_the_body_and_no_key() -> None:
    body = {"model": "echo", "input": {"messages": [{"role": "user", "content": 'it\'s "so"'}]}}

    code = code_of("http://127.0.0.1:8000", body)

    sent = {"model": "echo", **body["input"]}  # type: ignore[dict-item]  # a dict
    shell = code["curl"].partition("-d '")[2].removesuffix("'").replace("'\\''", "'")
    assert json.loads(shell) == sent
    call = ast.parse(code["Python"]).body[2]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    given = next(each for each in call.value.keywords if each.arg == "json")
    assert ast.literal_eval(given.value) == sent
    assert all("TOLLGATE_API_KEY" in text and "tg_" not in text for text in code.values())


def order(browser: Browser, **fields: str) -> Any:
    return browser.post(ORDER, {"model": "echo", "task": "text-generation", **fields}, headers=JSON)


def test_quote_is_that_of_the_api_and_comes_with_code(installation: Installation) -> None:
    browser = installation.visitor("viewer")

    form = {"model": "echo", "task": "text-generation", "message": "one", "max_tokens": "10"}
    quoted = browser.post(QUOTE, form, headers=JSON).json()

    secret, _ = installation.key()
    body = {"model": "echo", "max_tokens": 10, "messages": [{"role": "user", "content": "one"}]}
    asked = installation.client.post(
        "/v1/quote", json=body, headers={"Authorization": f"Bearer {secret}"}
    )
    assert quoted["most"] == f"${asked.json()['max_cost']}"
    assert set(quoted["code"]) == {"curl", "Python", "JavaScript"}


def test_refusals_are_those_of_the_api(installation: Installation) -> None:
    browser = installation.visitor("member")

    missing = order(browser)
    unserved = order(browser, message="one")
    strange = order(browser, message="one", max_tokens="many")
    page = browser.post(
        ORDER,
        {"model": "echo", "task": "text-generation", "message": "kept"},
        headers={**FORM, "Accept": "text/html"},
    )

    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "message")
    assert unserved.status_code == page.status_code == 503
    assert strange.json()["error"]["param"] == "max_tokens"
    assert "kept</textarea>" in page.text
    assert "echo is not available" in page.text


def test_picture_that_is_missing_is_named(installation: Installation) -> None:
    browser = installation.visitor("member")
    for url, status in (("file:0", 400), ("file:x", 400), ("req_1/sent-0", 404)):
        part = {"type": "image_url", "image_url": {"url": url}}

        refused = order(browser, messages=json.dumps([{"role": "user", "content": [part]}]))

        assert refused.status_code == status


def test_page_needs_an_account(installation: Installation) -> None:
    assert installation.visitor("operator").get("/console/playground").status_code == 404
    assert installation.visitor(None).get("/console/playground").status_code == 303


def test_embeddings_are_shown_by_their_first_numbers_and_cosines() -> None:
    vectors = [struct.pack("<8f", *numbers) for numbers in ([1.0] + [0.0] * 7, [1.0] * 8)]

    shown = vectors_text(vectors).splitlines()

    assert (
        shown[0] == "1: 8 numbers, norm 1.0000: 1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, …"
    )
    assert shown[2:] == [
        "cosine        1        2",
        "     1   1.0000   0.3536",
        "     2   0.3536   1.0000",
    ]
    assert vectors_text([]) == ""


def test_scores_and_transcripts_are_shown_as_lines() -> None:
    segment = {"start_ms": 400, "end_ms": 1920, "text": " Good day.", "tokens": [1, 2]}
    word = {"start_ms": 400, "end_ms": 900, "text": " Good"}
    transcript = {"duration_ms": 2000, "language": "english", "segments": [segment]}

    assert scores_text([0.25, 0.5]) == "0.5000  document 2\n0.2500  document 1\n"
    assert transcript_text({**transcript, "words": [word]}).splitlines() == [
        "2 s, english",
        "   0.40 to 1.92  Good day.",
        "   0.40 to 0.90  Good",
    ]
