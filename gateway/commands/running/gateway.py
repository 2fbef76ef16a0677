"""``tollgate gateway``: the gateway processes and their scheduled tasks."""

from __future__ import annotations

from typing import Final

import click

from gateway.commands.running.queue_client import ask
from gateway.commands.terminal import (
    columns,
    example,
    json_option,
    look_up,
    print_views,
    read_settings,
)
from gateway.operations.running.gateways import Gateways, GatewayState, gateway_view, list_tasks
from gateway.operations.running.server import QueueServer
from gateway.scheduled import due_times

GATEWAY: Final = columns(
    "name host process version started_at waiting accepted settled refused commit_size "
    "database_ms queue_ms schema"
)
TASK: Final = columns("name next_at last_at took_s failed gateway")


@click.group()
def gateway() -> None:
    """Gateway processes."""


@gateway.command("list", epilog=example("tollgate gateway list"))
@json_option
def gateway_list(as_json: bool) -> None:
    """List the gateway processes that run, with their counters and latencies."""
    print_views([gateway_view(state) for state in _states()], GATEWAY, as_json)


@gateway.command("tasks", epilog=example("tollgate gateway tasks"))
@json_option
def gateway_tasks(as_json: bool) -> None:
    """List the scheduled tasks: when each ran and is next due."""
    print_views(list_tasks(_states(), look_up(due_times)), TASK, as_json)


def _states() -> list[GatewayState]:
    async def read(server: QueueServer) -> list[GatewayState]:
        return await Gateways(server.redis, namespace=server.namespace).list()

    return ask(read_settings(), read)
