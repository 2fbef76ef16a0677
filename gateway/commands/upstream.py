"""``tollgate upstream``: services that run models of the catalog."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Final

import click
import msgspec

from gateway.catalog.loader import load_catalog
from gateway.catalog.upstream_check import UpstreamFinding, check_upstreams, questions
from gateway.commands.running.queue_client import ask
from gateway.commands.terminal import (
    columns,
    example,
    json_option,
    print_views,
    read_settings,
    refuse,
)
from gateway.operations.running.upstreams import list_upstreams
from gateway.operations.running.workers import list_workers

ENDPOINT: Final = columns(
    "host tier state in_flight limit failures down_since next_call_at calls p95_ms models"
)


@click.group()
def upstream() -> None:
    """Services that run models of the catalog."""


@upstream.command("check", epilog=example("GMI_API_KEY=… tollgate upstream check"))
@click.argument("name", required=False)
@json_option
def upstream_check(name: str | None, as_json: bool) -> None:
    """Compare contracts and prices with what upstreams publish.

    Reports renamed parameters, models that are gone, and prices above ours; exits with 1 if there
    is an error. Models whose credential is not in the environment are listed with what would be
    asked. Nothing is ordered.
    """
    entries = load_catalog(read_settings().catalog).models
    if name is not None:
        entries = tuple(entry for entry in entries if entry.name == name)
        if not entries:
            refuse(f"the catalog has no model {name!r}")
    found, asked = asyncio.run(check_upstreams(entries, os.environ))
    silent = [one for one in questions(entries) if not os.environ.get(one.credential)]
    if as_json:
        report = {
            "asked": asked,
            "findings": [asdict(one) for one in found],
            "not_asked": [asdict(one) for one in silent],
        }
        click.echo(msgspec.json.encode(report).decode())
    else:
        for finding in found:
            click.echo(_line(finding))
        for one in silent:
            click.echo(f"{one.model}: {one.credential} is not set; would ask GET {one.url}")
        click.echo(f"{asked} models asked, {len(found)} findings, {len(silent)} models not asked")
    if any(finding.level == "error" for finding in found):
        raise SystemExit(1)


@upstream.command("list", epilog=example("tollgate upstream list"))
@json_option
def upstream_list(as_json: bool) -> None:
    """List the endpoints of upstreams as all workers see them, those that are down first."""
    settings = read_settings()
    entries = load_catalog(settings.catalog).models
    views = list_upstreams(entries, ask(settings, list_workers))
    print_views(views, ENDPOINT, as_json)


def _line(finding: UpstreamFinding) -> str:
    return f"{finding.model}: {'warning: ' * (finding.level == 'warning')}{finding.message}"
