"""A submission to a workflow, unchecked. A module of its own, so that it imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkflowSubmission:
    """Values that a client sends to a workflow, by input name."""

    given: Mapping[str, Any]
