"""Our pocket model served by llama.cpp, as a real upstream server.

Needs the extra ``peers``; what upstreams do is proven without it in ``test_upstream``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gguf import convert
from tests.workers.test_upstream_endpoints import Agent, until
from workers.contract.jobs import Cancelled, Completed
from workers.contract.models import UpstreamSpec

xllamacpp = pytest.importorskip("xllamacpp", reason="the extra 'peers' is not installed")
pytest.importorskip("gguf", reason="the extra 'peers' is not installed")

CHECKPOINT = Path(__file__).parents[2] / "workers" / "pocket" / "chat"
HOLD: Any = [{"role": "user", "content": "What is a hold?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    params = xllamacpp.CommonParams()
    params.model.path = str(convert(CHECKPOINT, tmp_path_factory.mktemp("gguf") / "model.gguf"))
    params.n_parallel = 4
    params.n_ctx = 4 * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    del server


@contextlib.asynccontextmanager
async def agent(url: str) -> Any:
    made = Agent(UpstreamSpec(url, model="pocket-chat"))
    task = asyncio.create_task(made.host.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_it_answers_streams_and_counts(url: str) -> None:
    async with agent(url) as made:
        outcome = await made.ask(messages=HOLD, max_tokens=40, temperature=0.0)

    assert isinstance(outcome, Completed), outcome
    (choice,) = outcome.output["choices"]
    assert "hold" in choice.text
    assert choice.finish_reason == "stop"
    said = "".join(event.text for event in made.events if hasattr(event, "text"))
    assert said == choice.text
    assert outcome.usage.input_tokens + outcome.usage.cached_input_tokens > 5
    assert 5 < outcome.usage.output_tokens <= 40
    assert outcome.timings.first_token_us > 0


async def test_a_cancelled_answer_ends_there_too(url: str) -> None:
    async with agent(url) as made:
        id = made.submit(1, messages=HOLD, max_tokens=900, logit_bias={2: -100.0})
        await until(lambda: len(made.events) > 3)
        made.host.cancel(id, "client")
        await until(lambda: id in made.outcomes)
        after = await made.ask(2, messages=HOLD, max_tokens=8)

    outcome = made.outcomes[id]
    assert isinstance(outcome, Cancelled)
    assert outcome.delivered
    assert 0 < outcome.usage.output_tokens < 900
    assert isinstance(after, Completed)


async def test_a_text_is_continued(url: str) -> None:
    async with agent(url) as made:
        outcome = await made.ask(messages=[], prompts=["A hold is money"], max_tokens=8)

    assert isinstance(outcome, Completed), outcome
    assert outcome.output["choices"][0].text
