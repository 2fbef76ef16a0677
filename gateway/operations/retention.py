"""Retention: what is kept, until when, and how far clearing is behind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.retention.clearing import State


class RetentionView(TypedDict):
    """State of a kind. ``due_at``: since or from when its oldest row is due."""

    object: Literal["retention"]
    kind: str
    setting: str | None
    due_at: str | None
    lag_s: float
    cleared: int
    cleared_at: str | None


def state_view(state: State, now: datetime) -> RetentionView:
    return {
        "object": "retention",
        "kind": state.kind.name,
        "setting": state.kind.setting or None,
        "due_at": timestamp(state.due_at) if state.due_at else None,
        "lag_s": round(state.lag(now).total_seconds(), 3),
        "cleared": state.cleared,
        "cleared_at": timestamp(state.cleared_at) if state.cleared_at else None,
    }


def record_run(connection: Connection, author: Author, cleared: Mapping[str, int]) -> None:
    """Record that an operator cleared what was due."""
    record(connection, author, "retention.run", "retention", after=dict(cleared))
