"""What ``tollgate catalog check --deep`` finds: whether engines here can load the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.catalog.market.contract_checks import Finding
from gateway.catalog.schema import Catalog, CatalogEntry
from gateway.commands.planning.trial_process import TrialFailed, run_inspection
from gateway.plan.hardware import GIGA, PRECISIONS
from gateway.plan.shapes import Shape
from gateway.plan.subjects import find_subject
from workers.contract.models import read_specs
from workers.contract.trials import Inspection


def inspect_checkpoints(path: Path, catalog: Catalog) -> dict[str, list[Finding]]:
    """Return what is wrong with the entries that engines here would serve, by their names.

    Takes some seconds, as it starts a process with torch. No weights are read.
    """
    entries = {entry.name: entry for entry in catalog.models if entry.engine is not None}
    specs = [spec for spec in read_specs(path) if spec.name in entries]
    found: dict[str, list[Finding]] = {}
    if not specs:
        return found
    try:
        for inspection in run_inspection(specs):
            entry = entries[inspection.model]
            found[entry.name] = list(inspection_findings(entry, inspection, path.resolve().parent))
    except TrialFailed as error:
        for spec in specs:
            found.setdefault(spec.name, [((), f"could not be inspected: {error}", "error")])
    return found


def inspection_findings(
    entry: CatalogEntry, inspection: Inspection, root: Path
) -> Iterator[Finding]:
    """Yield what an inspection says of an entry. ``root`` is the directory of the catalog."""
    if inspection.problem is not None:
        yield (), inspection.problem, "error"
        return
    for note in inspection.notes:
        yield (), note, "warning"
    memory = inspection.memory_bytes
    weights = (
        None if memory is None else weight_bytes(entry, root, on_cpu=inspection.device == "cpu")
    )
    if weights is None or memory is None:
        return
    if (needed := weights + inspection.cache_bytes) > memory:
        message = (
            f"needs {needed / GIGA:.1f} GB ({weights / GIGA:.1f} GB of weights), but "
            f"{inspection.device} has {memory / GIGA:.1f} GB; use a smaller dtype, fewer slots "
            f"or a shorter limits.context_tokens; other devices: tollgate plan {entry.name}"
        )
        yield (), message, "error"


def weight_bytes(entry: CatalogEntry, root: Path, *, on_cpu: bool) -> int | None:
    """Return the size of an entry's weights at its precision; None if they cannot be counted."""
    if entry.checkpoint is None:
        return None
    try:
        model = find_subject(entry.name, (entry,), root=root).model
    except (LookupError, ValueError):
        return None
    parameters = model.parameters if isinstance(model, Shape) else sum(model.counted.values())
    chosen = str(entry.options.get("dtype") or "auto")
    if chosen == "auto":  # on a GPU the checkpoint's own, on a CPU float32
        chosen = "float32" if on_cpu else model.precision or "bfloat16"
    return parameters * PRECISIONS[chosen]
