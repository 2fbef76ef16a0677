"""Examines the catalog: mistakes, checkpoints that do not exist, and upstreams without a key."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gateway.catalog.loader import check
from gateway.doctor.diagnosis import Diagnosis, note, ok, problem, warning
from workers.contract.models import ModelSpec, read_specs


def read_models(catalog: Path) -> tuple[ModelSpec, ...]:
    """Return the models of a catalog, or none if it cannot be read."""
    try:
        return read_specs(catalog)
    except (OSError, ValueError):
        return ()


def examine_catalog(
    catalog: Path, specs: Sequence[ModelSpec], environ: Mapping[str, str] = os.environ
) -> Iterator[Diagnosis]:
    found = check(catalog)
    mistakes = [one for one in found if one.level == "error"]
    for one in mistakes:
        yield problem("catalog", str(one), "Correct it, then run `tollgate catalog check`.")
    if mistakes:
        return
    said = f"{catalog} has {len(specs)} models and no mistakes"
    if found:
        advice = "Run `tollgate catalog check`, which prints them; the catalog works as it is."
        yield warning("catalog", f"{said}, but {len(found)} warnings", advice)
    else:
        yield ok("catalog", said)
    for spec in specs:
        if spec.checkpoint is not None and not Path(spec.checkpoint).exists():
            yield problem(
                "model",
                f"{spec.name}: the checkpoint {spec.checkpoint} does not exist",
                "Write the path of a directory, relative to the catalog: nothing is downloaded.",
            )
    missing = Counter(
        name
        for spec in specs
        if spec.upstream is not None and not spec.upstream.usable(environ)
        for name in dict.fromkeys(each.credential for each in spec.upstream.all_endpoints)
        if name is not None
    )
    for name, count in missing.items():
        yield note(
            "upstream",
            f"{count} models need {name}, which is not set here",
            "Set it in the environment of the worker, or leave it: they are then not offered.",
        )
