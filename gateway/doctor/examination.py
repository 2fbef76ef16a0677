"""Runs every examination, in the order in which a person would read the results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from redis.exceptions import RedisError

from gateway.doctor.database import examine_database
from gateway.doctor.diagnosis import Diagnosis
from gateway.doctor.machine import examine_machine
from gateway.doctor.models import examine_catalog, read_models
from gateway.doctor.services import (
    QueueState,
    examine_gateway,
    examine_queue,
    examine_workers,
    queue_url,
    read_queue,
)
from gateway.settings import Settings


def examine(settings: Settings) -> Iterator[Diagnosis]:
    """Yield what is found; nothing is changed but one row that gateways write to as well."""
    specs = read_models(settings.catalog)
    local = [spec.name for spec in specs if spec.engine is not None]
    yield from examine_machine(settings)
    yield from examine_catalog(settings.catalog, specs)
    yield from examine_database(settings, local)
    url = queue_url(settings)
    state = None if url is None else _ask(url, settings.namespace)
    yield from examine_queue(settings, url, state)
    yield from examine_gateway(settings)
    if isinstance(state, QueueState):
        yield from examine_workers(state, local)


def _ask(url: str, namespace: str) -> QueueState | Exception:
    try:
        return asyncio.run(read_queue(url, namespace=namespace))
    except (RedisError, OSError, TimeoutError, ValueError) as error:
        return error
