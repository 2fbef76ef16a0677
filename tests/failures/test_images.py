"""Crashes while images are generated: each is generated identically and charged once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from sqlalchemy import select, update

from gateway.files.retention import MediaStore
from gateway.sql.database import Database
from gateway.tables.files import media
from tests.artist import png
from tests.failures.conftest import mended, own_stack
from tests.failures.test_batches import ended as batch_ended
from tests.failures.test_batches import lines_of, now
from tests.stack import Caller, Stack, ended, wait_for
from tests.workers.diffusion.checkpoints import make_checkpoint
from workers.contract.blobs import Blobs

STEPS = 40
COST = Decimal("0.01") + STEPS * Decimal("0.0001")
MODEL = """\
  - name: tiny-image
    task: text-to-image
    also: [image-to-image]
    engine: diffusion
    checkpoint: {checkpoint}
    options: {{threads: 1}}
    sizes: ["32x32"]
    limits: {{images: 2, steps: 50}}
    price:
      - {{unit: image, amount: "0.01"}}
      - {{unit: step, amount: "0.0001"}}
"""
LOADING_S = 150.0
"""A lease lapses, another process starts and loads the model again."""
SOURCE = "data:image/png;base64," + base64.b64encode(png(32, 32, 200)).decode()

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        # The library would have its own older settings written otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        return make_checkpoint("StableDiffusionPipeline", tmp_path_factory.mktemp("tiny") / "it")


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, checkpoint: Path
) -> Iterator[Stack]:
    models = MODEL.format(checkpoint=checkpoint)
    with own_stack(tmp_path_factory.mktemp("drawings"), postgres, more_models=models) as made:
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    yield from mended(shared)


def order(caller: Caller, **value: Any) -> str:
    """Submit a slow request for one image, with previews."""
    asked = {"prompt": "a red circle", "seed": 7, "steps": STEPS, "previews": 3, **value}
    answer = caller.http.post("/v1/requests", json={"model": "tiny-image", "input": asked})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def blobs_of(stack: Stack, caller: Caller) -> dict[str, set[str]]:
    """What the store has of an account: request → attempts, sources being one of them."""
    folder = stack.directory / "blobs" / str(caller.account_id)
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            request_id, nonce, _ = path.relative_to(folder).parts
            found.setdefault(request_id, set()).add("in" if nonce.startswith("in-") else nonce)
    return found


def until_half_drawn(stack: Stack, caller: Caller, request_id: str) -> set[str]:
    """Wait for a first preview in the store; return the attempt that made it."""
    wait_for(lambda: bool(blobs_of(stack, caller).get(request_id, set()) - {"in"}), "a preview")
    assert caller.http.get(f"/v1/requests/{request_id}").json()["status"] == "running"
    return blobs_of(stack, caller)[request_id] - {"in"}


def pixels(found: dict[str, Any]) -> bytes:
    assert found["status"] == "succeeded", found
    (medium,) = found["output"]["media"]
    assert medium["seed"] == 7
    # Not the bytes: they name their request.
    return Image.open(io.BytesIO(httpx.get(medium["url"]).content)).tobytes()


def all_is_well(stack: Stack, caller: Caller, *, drawn: int) -> None:
    """Nothing is held, the books agree, and the bill is right to the last digit."""
    assert stack.held(caller) == 0
    assert stack.findings() == []
    usage = caller.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == drawn
    assert Decimal(usage["cost"]) == drawn * COST
    assert Decimal(caller.http.get("/v1/balance").json()["posted"]) == 1 - drawn * COST


@pytest.mark.parametrize("who", [pytest.param("engine", marks=pytest.mark.long), "worker"])
def test_image_is_generated_identically_after_a_crash(who: str, stack: Stack) -> None:
    caller = stack.caller()
    undisturbed = pixels(ended(caller, order(caller, image=SOURCE, strength=1)))
    request_id = order(caller, image=SOURCE, strength=1)
    first = until_half_drawn(stack, caller, request_id)

    if who == "engine":
        stack.kill_engine()
    else:
        stack.kill("worker")
        stack.start_worker()

    assert pixels(ended(caller, request_id, patience_s=LOADING_S)) == undisturbed
    all_is_well(stack, caller, drawn=2)
    wait_for(lambda: not first & blobs_of(stack, caller)[request_id], "the first attempt to go")
    assert len(blobs_of(stack, caller)[request_id]) == 2, "the sources and one attempt"


def test_gateway_crash_between_attachments_and_hold_leaves_nothing(stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(failpoint="sources_stored")
    with contextlib.suppress(httpx.HTTPError):
        order(caller, image=SOURCE)
    stack.processes.pop("gateway").wait(timeout=20)
    assert list(blobs_of(stack, caller).values()) == [{"in"}]

    stack.start_gateway()

    assert caller.http.get("/v1/requests").json()["data"] == []
    assert stack.held(caller) == 0
    clear(stack, later=timedelta())
    assert blobs_of(stack, caller), "whoever accepts it may still be about to"
    clear(stack, later=timedelta(minutes=16))
    assert blobs_of(stack, caller) == {}
    assert pixels(ended(caller, order(caller, image=SOURCE, strength=1)))
    all_is_well(stack, caller, drawn=1)


def clear(stack: Stack, *, later: timedelta) -> None:
    """Clear away what is due, as the gateway does by itself, after some time."""

    async def run() -> None:
        database = Database(stack.database_url)
        with database.transaction() as connection:
            for row in connection.execute(select(media)).all():
                change = update(media).where(media.c.request_id == row.request_id)
                connection.execute(change.values(clear_at=row.clear_at - later))
        blobs = Blobs(stack.environment()["BLOB_URL"])
        await MediaStore(database, blobs, retention=timedelta(hours=1)).delete_ended()
        await database.close()

    asyncio.run(run())


def test_image_is_stored_once_the_blob_store_returns(stack: Stack) -> None:
    caller = stack.caller()
    undisturbed = pixels(ended(caller, order(caller, previews=0)))
    request_id = order(caller, previews=0)
    # A file where its directory should be.
    obstacle = stack.directory / "blobs" / str(caller.account_id) / request_id
    obstacle.write_bytes(b"in the way")
    wait_for(
        lambda: "could not store a blob" in (stack.directory / "worker.log").read_text(),
        "the worker to fail",
    )
    assert caller.http.get(f"/v1/requests/{request_id}").json()["status"] == "running"
    assert stack.held(caller) > 0

    obstacle.unlink()

    assert pixels(ended(caller, request_id, patience_s=LOADING_S)) == undisturbed
    all_is_well(stack, caller, drawn=2)
    assert len(blobs_of(stack, caller)[request_id]) == 1


@pytest.mark.parametrize(
    "point",
    [
        "sources_stored",
        pytest.param("after_hold", marks=pytest.mark.long),
        pytest.param("batch_line_recorded", marks=pytest.mark.long),
        pytest.param("batch_files_written", marks=pytest.mark.long),
    ],
)
def test_image_batch_survives_a_gateway_crash_at_each_failpoint(point: str, stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(failpoint=point)
    batch_id = submit(caller, count=3)
    stack.processes.pop("gateway").wait(timeout=20)

    stack.start_gateway()

    batch = batch_ended(caller, batch_id, patience_s=LOADING_S)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    found = lines_of(caller, batch["output_file_id"])
    ids = {line["response"]["request_id"] for line in found}
    pictures = [line["response"]["body"]["data"][0]["b64_json"] for line in found]
    assert [line["custom_id"] for line in found] == ["0", "1", "2"]
    assert len(ids) == len(set(pictures)) == 3
    usage = caller.http.get("/v1/usage").json()["total"]
    # Half the price of an image and of its two steps.
    assert (usage["charged_requests"], Decimal(usage["cost"])) == (3, 3 * Decimal("0.0051"))
    assert stack.held(caller) == 0
    assert stack.findings() == []
    clear(stack, later=timedelta(minutes=16))
    kept = {name: made for name, made in blobs_of(stack, caller).items() if name[:4] == "req_"}
    assert kept.keys() == ids
    assert {len(made) for made in kept.values()} == {2}, "the sources and one attempt"


def test_image_batch_survives_a_worker_crash(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, count=3, steps=STEPS)
    wait_for(lambda: now(caller, batch_id).get("status") == "in_progress", "the batch to begin")
    wait_for(
        lambda: any(
            row["status"] == "running" for row in caller.http.get("/v1/requests").json()["data"]
        ),
        "a line to run",
    )
    time.sleep(0.5)

    stack.kill("worker")
    stack.start_worker()

    batch = batch_ended(caller, batch_id, patience_s=LOADING_S)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    usage = caller.http.get("/v1/usage").json()["total"]
    assert (usage["charged_requests"], Decimal(usage["cost"])) == (3, 3 * COST / 2)
    assert stack.held(caller) == 0
    assert stack.findings() == []


def submit(caller: Caller, *, count: int, steps: int = 2) -> str:
    body = {
        "model": "tiny-image",
        "prompt": "a red circle",
        "image": SOURCE,
        "strength": 1,
        "steps": steps,
        "response_format": "b64_json",
    }
    path = "/v1/images/edits"
    text = b"".join(
        json.dumps(
            {"custom_id": str(n), "method": "POST", "url": path, "body": {**body, "seed": n}}
        ).encode()
        + b"\n"
        for n in range(count)
    )
    file = caller.http.post("/v1/files", files={"file": text}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    made = caller.http.post("/v1/batches", json=asked)
    assert made.is_success, made.text
    return str(made.json()["id"])
