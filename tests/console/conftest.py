from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from gateway.sql import database
from gateway.sql.lanes import PAGE
from tests.console.visiting import Installation, installed
from tests.databases import Databases


@pytest.fixture(scope="package", autouse=True)
def patient_pages() -> Iterator[None]:
    """Give pages more than two seconds: other tests share the processor."""
    patient = replace(PAGE, statement_s=20, lock_s=20, patience_s=21)
    with mock.patch.object(database, "PAGE", patient):
        yield


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("console")
    url = Databases("sqlite", directory, postgres).make()
    with installed(directory / "home", url, valkey) as made:
        yield made
