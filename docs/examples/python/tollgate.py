"""What the examples share: a client of the native API that waits for a request and saves its files.

`TOLLGATE_URL` and `TOLLGATE_API_KEY` say where the gateway is, and who pays.
"""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

import httpx

URL = os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8000")
KEY = os.environ["TOLLGATE_API_KEY"]

api = httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def run(model: str, /, **given: Any) -> dict[str, Any]:
    """Order a request, wait until it has ended, and return it with its output."""
    request = checked(api.post("/v1/requests", json={"model": model, "input": given}))
    while request["status"] in ("queued", "running"):
        time.sleep(0.2)
        request = checked(api.get(f"/v1/requests/{request['id']}"))
    if request["status"] != "succeeded":
        raise RuntimeError(request["error"]["message"])
    print(f"{model}: ${request['cost']}, receipt at /v1/requests/{request['id']}/receipt")
    return request


def save(request: dict[str, Any], name: str) -> None:
    """Download the first file of a request's output."""
    medium = next(one for one in request["output"]["media"] if one["role"] == "output")
    Path(name).write_bytes(httpx.get(medium["url"]).raise_for_status().content)
    print(f"saved {name}")


def data_uri(path: Path, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def checked(answer: httpx.Response) -> Any:
    """Return the body of an answer. Raise with the gateway's own words if it was refused."""
    if answer.is_error:
        raise RuntimeError(answer.json()["error"]["message"])
    return answer.json()
