"""The base of everything that people write: bodies of requests, the catalog, lines of a batch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """An unknown field is an error, so that a misspelt one is not ignored."""

    model_config = ConfigDict(extra="forbid")
