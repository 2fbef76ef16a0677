"""What is wrong with a catalog that can be loaded: contracts that it contradicts, and losses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from gateway.catalog.costs import cost_findings
from gateway.catalog.market.contract_checks import Finding, contract_findings
from gateway.catalog.schema import CatalogEntry

log = logging.getLogger(__name__)


def findings(entry: CatalogEntry) -> Iterator[Finding]:
    yield from contract_findings(entry)
    yield from cost_findings(entry)


def log_findings(entries: Iterable[CatalogEntry]) -> None:
    """Log contradictions each, and together the models that can cost more than they sell for.

    Takes half a second the first time, because the contracts are read.
    """
    losing = []
    for entry in entries:
        for _, message, level in contract_findings(entry):
            if level == "error":
                log.warning("catalog: %s: %s", entry.name, message)
        if any(cost_findings(entry)):
            losing.append(entry.name)
    if losing:
        log.warning(
            "requests to %d models can cost more than they sell for: %s; see `tollgate catalog "
            "check`",
            len(losing),
            ", ".join(sorted(losing)),
        )
