"""An order for a workflow, before anything of it is checked. Knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkflowSubmission:
    """What a client sends to a workflow, by the names of its inputs."""

    given: Mapping[str, Any]
