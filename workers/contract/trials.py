"""What a command agrees on with its process that has torch: lines of JSON.

``tollgate try`` sends a ``TrialOrder`` to the standard input of a process that loads a model, and
reads reports until it ends. ``tollgate catalog check --deep`` does the same with an
``InspectionOrder``. Both sides have the same version.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from workers.contract.jobs import Timings
from workers.contract.models import ModelSpec


class ReferenceAnswer(msgspec.Struct, frozen=True):
    """What the reference precision made of an input: greedy tokens, or a picture as a file."""

    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    picture: bytes = b""


class TrialOrder(msgspec.Struct, frozen=True):
    spec: ModelSpec
    """The entry with the precision to be tried."""
    batches: tuple[int, ...]
    inputs: tuple[dict[str, Any], ...]
    """Inputs of jobs; repeated if more are needed."""
    answer_tokens: int
    """Maximum tokens of an answer that is compared."""
    reference: tuple[ReferenceAnswer, ...] | None = None
    """Answers to compare with, one for each input; None if this precision is the reference."""
    files: tuple[bytes, ...] = ()
    """Attachments of each input."""


class TrialRun(msgspec.Struct, frozen=True, tag="run"):
    """A load of constant concurrency: every request that ends is followed by the next."""

    batch: int
    seconds: float = 0.0
    load_seconds: float = 0.0
    output_tokens: int = 0
    timings: tuple[Timings, ...] = ()
    """Of each request; ``total_us`` is the time from its submission to its end."""
    device: str = ""
    problem: str | None = None
    """Reason why it could not be run; the other fields are then empty."""


class TrialReference(msgspec.Struct, frozen=True, tag="reference"):
    answers: tuple[ReferenceAnswer, ...]


class TrialAgreement(msgspec.Struct, frozen=True, tag="agreement"):
    """Comparison with the reference."""

    compared: int = 0
    """Tokens of the reference's answers."""
    equal: int = 0
    """Those that this precision chooses as well, after the same tokens."""
    difference: float | None = None
    """Mean difference of the pictures' values, as a share of the whole range."""
    problem: str | None = None
    """Reason why they could not be compared."""


TrialReport: TypeAlias = TrialRun | TrialReference | TrialAgreement


class InspectionOrder(msgspec.Struct, frozen=True):
    """Entries whose checkpoints are to be checked without reading their weights."""

    specs: tuple[ModelSpec, ...]


class Inspection(msgspec.Struct, frozen=True):
    """What was found in the checkpoint of an entry."""

    model: str
    problem: str | None = None
    """Reason why it cannot be loaded; the other fields are then empty."""
    notes: tuple[str, ...] = ()
    device: str = ""
    memory_bytes: int | None = None
    """Memory of the device; None if it is unknown."""
    cache_bytes: int = 0
    """Memory that the model takes beside its weights."""
