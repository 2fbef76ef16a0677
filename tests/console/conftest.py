from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.console.visiting import Installation, installed
from tests.databases import Databases


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("console")
    url = Databases("sqlite", directory, postgres).make()
    with installed(directory / "home", url, valkey) as made:
        yield made
