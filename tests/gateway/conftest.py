from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.databases import Databases
from tests.stack import Stack, running
from tests.workers.llm.checkpoints import TOOLS_TEMPLATE, make_checkpoint


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """One gateway and one worker for the tests of a process; every test has its own account."""
    directory = tmp_path_factory.mktemp("stack")
    url = Databases("sqlite", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


TINY = """\
  - name: tiny
    task: text-generation
    engine: llm
    checkpoint: {checkpoint}
    options: {{slots: 8, threads: 1}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price: *price
  - name: tiny-embed
    task: text-embedding
    engine: embedding
    checkpoint: {checkpoint}
    options: {{matryoshka: true}}
    limits: {{context_tokens: 64, inputs: 100, dimensions: 48}}
    price: [{{unit: input_token, amount: "0.01", per: 1000000}}]
"""


@pytest.fixture(scope="session")
def shared_text_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """With a language model of random weights, whose template knows tools."""
    directory = tmp_path_factory.mktemp("text")
    checkpoint = make_checkpoint("qwen3", directory / "tiny", template=TOOLS_TEMPLATE)
    url = Databases("sqlite", directory, postgres).make()
    with running(
        directory / "home",
        url,
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=TINY.format(checkpoint=checkpoint),
    ) as made:
        yield made


@pytest.fixture
def text_stack(shared_text_stack: Stack) -> Iterator[Stack]:
    yield shared_text_stack
    shared_text_stack.close_clients()


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    yield shared_stack
    shared_stack.close_clients()
