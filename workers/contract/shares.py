"""Chooses by weight which of several versions runs a job. Pure.

Rendezvous hashing: the same key chooses the same version in every process, and where a version is
missing, only the keys that chose it are distributed among the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def choose(weights: Mapping[str, float], key: str) -> str:
    """Return the name that a key chooses: over many keys, each in proportion to its weight."""
    return max(weights, key=lambda name: -weights[name] / math.log(_fraction(name, key)))


def _fraction(name: str, key: str) -> float:
    """Return a number above 0 and below 1, evenly distributed over the keys."""
    digest = hashlib.sha256(f"{name}\n{key}".encode()).digest()
    return (int.from_bytes(digest[:6]) + 0.5) / 2**48
