"""``tollgate model``: serve an own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, get_args

import click
from pydantic import ValidationError

from gateway.catalog.editing.insertion import add_entry, entry_text
from gateway.catalog.loader import complaints, dotted, load_catalog
from gateway.catalog.schema import Catalog, CatalogEntry
from gateway.catalog.tasks import Task
from gateway.commands.planning.deep_check import inspection_findings
from gateway.commands.planning.proposal import MARKUP, NotServed, Proposal, propose, propose_price
from gateway.commands.planning.trial_process import TrialFailed, run_inspection, run_trial
from gateway.commands.planning.trial_subject import TRIED_TASKS, TrialSubject
from gateway.commands.prices import read_component
from gateway.commands.terminal import example, json_option, print_json, read_settings, refuse
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import GIGA
from gateway.plan.this_machine import devices_here
from gateway.settings import Settings
from workers.contract.models import ModelSpec
from workers.contract.trials import TrialOrder, TrialRun

PROOF_TOKENS: Final = 4


@click.group()
def model() -> None:
    """Own checkpoints in the catalog."""


@model.command(
    "add",
    epilog=example(
        'tollgate model add /models/qwen3-8b --price "output_token 0.75 1000000" \\',
        '  --price "input_token 0.25 1000000"',
        "tollgate model add /models/sdxl --name my-sdxl --dry-run",
    ),
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--name", help="Name that clients send.  [default: that of the directory]")
@click.option("--task", type=click.Choice(get_args(Task)), help="Task.  [default: by directory]")
@click.option(
    "--price",
    "prices",
    multiple=True,
    help='"UNIT AMOUNT [PER]": price of one unit in USD; once for each unit.  '
    f"[default: {MARKUP} times the expected cost]",
)
@click.option(
    "--catalog",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Catalog file.  [default: TOLLGATE_CATALOG]",
)
@click.option("--dry-run", is_flag=True, help="Propose and prove the entry, but write nothing.")
@json_option
def model_add(
    directory: Path,
    name: str | None,
    task: Task | None,
    prices: tuple[str, ...],
    file: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Add a Hugging Face checkpoint or a diffusers pipeline to the catalog.

    Reads what DIRECTORY has, proposes an entry and a price, proves the entry by a forward pass in a
    process of its own, and writes it into the catalog file, whose comments stay. The price comes
    from the plan, if the price of a device hour is known (gpu_hours of the catalog,
    TOLLGATE_GPU_HOUR_USD). Exits with 1 if no engine here can load it.
    """
    settings = read_settings()
    path = file or settings.catalog
    catalog = load_catalog(path)
    root = path.resolve().parent
    if not directory.is_dir():
        refuse(
            f"{directory} is not a directory; nothing is downloaded: fetch a model of a hub first, "
            "such as by `hf download OWNER/NAME --local-dir DIRECTORY`"
        )
    full = directory.resolve()
    own = name or full.name
    if any(own in (entry.name, *entry.aliases) for entry in catalog.models):
        refuse(f"the catalog already has {own!r}; choose another --name, or edit {path}")
    try:
        proposal = propose(
            full,
            name=own,
            checkpoint=str(full.relative_to(root) if full.is_relative_to(root) else full),
            task=task,
            devices=devices_here(),
            rates=_rates(settings, catalog),
        )
    except NotServed as error:
        refuse(str(error))
    lines = [read_component(text) for text in prices] or propose_price(proposal)
    if not lines:
        refuse(
            "what it costs here is not known, so no price can be proposed; set --price, such as "
            '--price "output_token 0.75 1000000"'
        )
    fields = {**proposal.fields, "price": lines}
    try:
        entry = CatalogEntry.model_validate(fields)
    except ValidationError as error:
        refuse("; ".join(f"{dotted(place)}: {message}" for place, message in complaints(error)))
    if not as_json:
        _print(proposal, fields)
    proof = _prove(entry, full, root)
    if not dry_run:
        add_entry(path, fields)
    if as_json:
        print_json(
            {
                "object": "model",
                "entry": fields,
                "plan": proposal.plan,
                "proof": proof,
                "written": None if dry_run else str(path),
            }
        )
        return
    click.echo(f"proved: {proof}")
    if dry_run:
        click.echo("nothing was written")
        return
    click.echo(f"written to {path}")
    click.echo(
        "next: load it by SIGHUP to the gateway or POST /v1/admin/catalog/reload; then "
        f"`tollgate try {own}`"
    )


def _rates(settings: Settings, catalog: Catalog) -> ExpenseRates:
    return ExpenseRates(hours=catalog.gpu_hours, hour_nanos=settings.gpu_hour_nanos)


def _prove(entry: CatalogEntry, checkpoint: Path, root: Path) -> str:
    """Ask the engine, then run the model once if its input is a text alone. Return what was done;
    exit with the reason if it cannot be served."""
    spec = ModelSpec(
        entry.name,
        entry.task,
        entry.engine,
        str(checkpoint),
        dict(entry.options),
        entry.limits.model_dump(exclude_none=True),
    )
    try:
        for inspection in run_inspection([spec]):
            for _, message, level in inspection_findings(entry, inspection, root):
                if level == "error":
                    refuse(f"{entry.name} cannot be loaded: {message}")
                click.echo(f"warning: {message}", err=True)
        if entry.task not in TRIED_TASKS:
            return "its configuration; its first request proves the weights"
        subject = TrialSubject(entry.name, entry.task, spec, entry, "")
        order = TrialOrder(spec, (1,), subject.inputs(["Hello."], PROOF_TOKENS), PROOF_TOKENS)
        for report in run_trial(order, threads=None):
            if isinstance(report, TrialRun):
                if report.problem is not None:
                    refuse(f"{entry.name} cannot be served: {report.problem}")
                return (
                    f"loaded in {report.load_seconds:.1f} s on {report.device}, and "
                    f"{len(report.timings)} requests answered in {report.seconds:.2f} s"
                )
    except TrialFailed as error:
        refuse(f"{entry.name} cannot be proved: {error}")
    raise AssertionError("the process reported nothing")


def _print(proposal: Proposal, fields: dict[str, Any]) -> None:
    plan, here = proposal.plan, proposal.here
    size = f"{plan['parameters']:,} weights, {plan['weight_bytes'] / GIGA:.3g} GB"
    click.echo(f"{plan['model']}: {plan['task']}, {size}")
    if here is not None:
        fits = "fits" if here["fits"] else "does not fit"
        room = f"{here['memory_bytes'] / GIGA:.3g} GB"
        sequences = f", {here['text']['sequences']:,} sequences" if here["text"] else ""
        click.echo(f"{here['name']}: {room}, {fits}{sequences}")
    click.echo("")
    click.echo(entry_text(fields))
