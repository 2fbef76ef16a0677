"""The process of ``tollgate catalog check --deep``: asks engines whether they can load checkpoints.

No weights are read. Ends with its parent, as ``trial`` does.
"""

from __future__ import annotations

import logging

from workers.contract.models import ModelSpec
from workers.contract.trials import Inspection, InspectionOrder
from workers.engines import registry
from workers.protocol.engine import Inspected, Inspecting
from workers.runtime.trial import open_channel

log = logging.getLogger(__name__)


def inspect(spec: ModelSpec) -> Inspection:
    """Check an entry; whatever its engine raises is its problem."""
    if obstacle := registry.obstacle(spec):
        return Inspection(spec.name, obstacle)
    try:
        engine = registry.create(spec)
        found = engine.inspect() if isinstance(engine, Inspecting) else Inspected()
    except ValueError as error:
        return Inspection(spec.name, str(error))
    except Exception as error:
        log.exception("could not inspect", extra={"model": spec.name})
        return Inspection(spec.name, f"{type(error).__name__}: {error}")
    return Inspection(
        spec.name, None, found.notes, found.device, found.memory_bytes, found.cache_bytes
    )


def main() -> None:
    order, report = open_channel(InspectionOrder)
    for spec in order.specs:
        report(inspect(spec))


if __name__ == "__main__":
    main()
