"""What is wrong with a catalog that can be loaded: contradicted contracts, losses, and examples
with words that their models do not know."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from gateway.catalog.costs import cost_findings
from gateway.catalog.market.contract_checks import Finding, contract_findings
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS
from gateway.catalog.vocabulary.words import texts_of, unknown_words

log = logging.getLogger(__name__)


def findings(entry: CatalogEntry) -> Iterator[Finding]:
    yield from contract_findings(entry)
    yield from cost_findings(entry)
    yield from _vocabulary_findings(entry)


def _vocabulary_findings(entry: CatalogEntry) -> Iterator[Finding]:
    if entry.vocabulary is None:
        return
    if entry.workflow is not None or TASKS[entry.task].makes in (
        *("text", "embedding", "ranking", "transcript"),
    ):
        message = "has no effect: only prompts of images, videos and audio are read by it"
        yield ("vocabulary",), message, "warning"
        return
    for index, example in enumerate(entry.examples):
        for field, text in texts_of(example).items():
            for warning in unknown_words(entry, {field: text}):
                words = ", ".join(map(repr, warning.unknown))
                yield ("examples", index, field), f"not in the vocabulary: {words}", "warning"


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
