"""A call as code: what the form sends, as curl, Python and JavaScript, without a key. Pure.

Files are read from the working directory by the names that they were uploaded with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.files.kept_inputs import KeptInput
from gateway.files.sources import SentSource, StoredSource, UploadedSource
from workers.contract.jobs import BlobRef
from workers.contract.kinds import EXTENSIONS

_MARK: Final = "file:\N{REPLACEMENT CHARACTER}"
"""What precedes the name of a file in the body, until the language's own expression reads it."""
_FILE: Final = re.compile(rf'(["\']){_MARK}([\w.-]+)\1', re.ASCII)
_UNSAFE: Final = re.compile(r"[^\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file that was sent with a request, by its name in the archive of the request's files."""

    name: str


def code_of(base_url: str, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the same call by name of the language."""
    shown = _without_bytes(body, {})
    if "messages" in shown["input"]:
        # Chat is called as by any other client.
        chat = {"model": shown["model"], **shown["input"]}
        url = f"{base_url}/v1/chat/completions"
        text = json.dumps(chat, ensure_ascii=False, indent=2)
        return {
            "curl": _curl(url, text),
            "Python": _python_call(url, chat),
            "JavaScript": _javascript_call(url, text),
        }
    url = f"{base_url}/v1/requests"
    text = json.dumps(shown, ensure_ascii=False, indent=2)
    return {
        "curl": _curl_order(url, text),
        "Python": _python_order(url, shown),
        "JavaScript": _javascript_order(url, text),
    }


def code_of_input(base_url: str, kept: KeptInput) -> dict[str, str]:
    """Return the call that sends the same as an earlier request did."""
    sent = _with_attachments(kept.input, kept.attachments)
    return code_of(base_url, {"model": kept.model, "task": kept.task, "input": sent})


def _with_attachments(value: Any, attachments: Sequence[BlobRef]) -> Any:
    """Return an input with the files in place of their numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"attachment"} and isinstance(place := value["attachment"], int):
            if not 0 <= place < len(attachments):
                return ""
            extension = EXTENSIONS.get(attachments[place].content_type, "bin")
            return AttachedFile(f"sent-{place}.{extension}")
        return {name: _with_attachments(one, attachments) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_attachments(one, attachments) for one in value]
    return value


def _without_bytes(value: Any, outputs: dict[str, int]) -> Any:
    """Return a body with names in place of files; ``outputs`` numbers those of earlier requests."""
    if isinstance(value, Mapping):
        return {name: _without_bytes(one, outputs) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_bytes(one, outputs) for one in value]
    if isinstance(value, SentSource):
        return f"{_MARK}{_UNSAFE.sub('_', value.filename) or 'file'}"
    if isinstance(value, AttachedFile):
        return f"{_MARK}{value.name}"
    if isinstance(value, UploadedSource):
        return value.file_id
    if isinstance(value, StoredSource):
        number = outputs.setdefault(value.blob.key, len(outputs))
        return f"{_MARK}output-{number}.{EXTENSIONS.get(value.blob.content_type, 'bin')}"
    # No text of the form is taken for a file.
    return value.replace(_MARK, "file:") if isinstance(value, str) else value


def _with_files(text: str, expression: Callable[[str], str]) -> str:
    return _FILE.sub(lambda found: expression(found[2]), text)


def _curl(url: str, text: str, options: str = "") -> str:
    quoted = _with_files(
        text.replace("'", "'\\''"), lambda name: f"\"data:;base64,'$(base64 -w0 < {name})'\""
    )
    return (
        f"curl {options}{url} \\\n"
        '  -H "Authorization: Bearer $TOLLGATE_API_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d '{quoted}'"
    )


def _curl_order(url: str, text: str) -> str:
    """Order, and then follow the events, of which the last one has the output."""
    order = _curl(url, text, "-s ")
    return (
        f'id=$({order} \\\n  | sed -n \'s/.*"id": *"\\(req_[0-9a-f]*\\)".*/\\1/p\')\n'
        f"curl -sN {url}/$id/events \\\n"
        '  -H "Authorization: Bearer $TOLLGATE_API_KEY"'
    )


_PYTHON_HEADERS: Final = '{"Authorization": f"Bearer {os.environ[\'TOLLGATE_API_KEY\']}"}'


def _python_call(url: str, body: Mapping[str, Any]) -> str:
    sent, begins = _python_sent(body, "os")
    return (
        f"{begins}answer = httpx.post(\n"
        f"    {url!r},\n"
        f"    headers={_PYTHON_HEADERS},\n"
        f"    json={sent},\n"
        "    timeout=120,\n"
        ")\n"
        "print(answer.json())"
    )


def _python_sent(body: Mapping[str, Any], *modules: str) -> tuple[str, str]:
    """Return a body as an expression, and the imports and the function that precede it."""
    sent = _with_files(repr(body), lambda name: f'data_uri("{name}")')
    reads = ""
    if sent != repr(body):
        modules = ("base64", *modules)
        reads = (
            "\n\ndef data_uri(name):\n"
            '    with open(name, "rb") as file:\n'
            '        return "data:;base64," + base64.b64encode(file.read()).decode()\n\n'
        )
    imports = "".join(f"import {name}\n" for name in modules)
    return sent, f"{imports}\nimport httpx\n{reads}\n"


def _python_order(url: str, body: Mapping[str, Any]) -> str:
    sent, begins = _python_sent(body, "os", "time")
    return (
        f"{begins}client = httpx.Client(headers={_PYTHON_HEADERS})\n"
        f"ordered = client.post({url!r}, json={sent}).raise_for_status().json()\n"
        'while ordered["status"] in ("queued", "running"):\n'
        "    time.sleep(0.5)\n"
        f'    ordered = client.get({url + "/"!r} + ordered["id"]).json()\n'
        'print(ordered["status"], ordered["cost"], ordered["output"])'
    )


_JAVASCRIPT_HEADERS: Final = (
    "{\n"
    '  "Authorization": `Bearer ${process.env.TOLLGATE_API_KEY}`,\n'
    '  "Content-Type": "application/json",\n'
    "}"
)


def _javascript_sent(text: str) -> tuple[str, str]:
    """Return a body as an expression, and the function that precedes it."""
    sent = _with_files(text, lambda name: f'await dataUri("{name}")')
    reads = (
        'import { readFile } from "node:fs/promises";\n\n'
        'const dataUri = async (name) => "data:;base64," + (await readFile(name, "base64"));\n'
    )
    return sent, "" if sent == text else reads


def _javascript_call(url: str, text: str) -> str:
    sent, begins = _javascript_sent(text)
    return (
        f"{begins}const answer = await fetch({json.dumps(url)}, {{\n"
        '  method: "POST",\n'
        f"  headers: {_JAVASCRIPT_HEADERS},\n"
        f"  body: JSON.stringify({sent}),\n"
        "});\n"
        "console.log(JSON.stringify(await answer.json(), null, 2));"
    )


def _javascript_order(url: str, text: str) -> str:
    sent, begins = _javascript_sent(text)
    return (
        f"{begins}const url = {json.dumps(url)};\n"
        f"const headers = {_JAVASCRIPT_HEADERS};\n"
        f"const body = JSON.stringify({sent});\n"
        'let ordered = await (await fetch(url, { method: "POST", headers, body })).json();\n'
        'while (["queued", "running"].includes(ordered.status)) {\n'
        "  await new Promise((wake) => setTimeout(wake, 500));\n"
        "  ordered = await (await fetch(`${url}/${ordered.id}`, { headers })).json();\n"
        "}\n"
        "console.log(ordered.status, ordered.cost, JSON.stringify(ordered.output, null, 2));"
    )
