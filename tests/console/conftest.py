from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from unittest import mock

import pytest
import time_machine

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
def mid_month() -> Iterator[None]:
    """Run a module's clock from noon of the 15th, so that neither a day nor a month ends within it.

    Whatever runs in other processes, like the queue server, keeps the real time.
    """
    noon = datetime.now(UTC).replace(day=15, hour=12, minute=0, second=0, microsecond=0)
    with time_machine.travel(noon):
        yield


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("console")
    url = Databases("sqlite", directory, postgres).make()
    with installed(directory / "home", url, valkey) as made:
        yield made
