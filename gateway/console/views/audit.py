"""Acts of the audit log as a list shows them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from gateway.checks.moments import read_moment
from gateway.operations.audit import AuditEventView


class FieldChange(NamedTuple):
    """A field that an act changed; None: it did not exist."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class AuditRow:
    id: str
    at: datetime
    act: str
    subject: str
    actor: str
    origin: str
    reason: str
    call_id: str
    refused: bool
    changes: Sequence[FieldChange]


def audit_row(view: AuditEventView) -> AuditRow:
    before, after = view["before"] or {}, view["after"] or {}
    names = {**before, **after}
    return AuditRow(
        id=view["id"],
        at=read_moment(view["at"]),
        act=view["act"],
        subject=view["subject"],
        actor=view["actor"],
        origin=view["origin"],
        reason=view["reason"],
        call_id=view["call_id"],
        refused=view["act"].endswith(".refuse"),
        changes=[
            FieldChange(name, _text(before, name), _text(after, name))
            for name in names
            if before.get(name) != after.get(name)
        ],
    )


def _text(fields: dict[str, Any], name: str) -> str | None:
    if name not in fields:
        return None
    value = fields[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
