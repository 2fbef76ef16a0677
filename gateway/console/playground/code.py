"""A call as code: what the form sends, as curl, Python and JavaScript, without a key. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.files.sources import SentSource

FILE: Final = "data:;base64,…"
"""What stands for the bytes of a file in code."""


def code_of(base_url: str, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the same call by name of the language."""
    shown = _without_bytes(body)
    path = "/v1/requests"
    if "messages" in shown["input"]:
        # Chat is called as by any other client.
        path, shown = "/v1/chat/completions", {"model": shown["model"], **shown["input"]}
    text = json.dumps(shown, ensure_ascii=False, indent=2)
    return {
        "curl": _curl(base_url + path, text),
        "Python": _python(base_url + path, shown),
        "JavaScript": _javascript(base_url + path, text),
    }


def _without_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_bytes(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_bytes(one) for one in value]
    return FILE if isinstance(value, SentSource) else value


def _curl(url: str, text: str) -> str:
    quoted = text.replace("'", "'\\''")
    return (
        f"curl {url} \\\n"
        '  -H "Authorization: Bearer $TOLLGATE_API_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d '{quoted}'"
    )


def _python(url: str, body: Mapping[str, Any]) -> str:
    return (
        "import os\n\nimport httpx\n\n"
        "answer = httpx.post(\n"
        f"    {url!r},\n"
        '    headers={"Authorization": f"Bearer {os.environ[\'TOLLGATE_API_KEY\']}"},\n'
        f"    json={body!r},\n"
        "    timeout=120,\n"
        ")\n"
        "print(answer.json())"
    )


def _javascript(url: str, text: str) -> str:
    return (
        f"const answer = await fetch({json.dumps(url)}, {{\n"
        '  method: "POST",\n'
        "  headers: {\n"
        '    "Authorization": `Bearer ${process.env.TOLLGATE_API_KEY}`,\n'
        '    "Content-Type": "application/json",\n'
        "  },\n"
        f"  body: JSON.stringify({text}),\n"
        "});\n"
        "console.log(await answer.json());"
    )
