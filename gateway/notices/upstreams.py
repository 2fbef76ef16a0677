"""The notice of models that their upstream no longer offers as the catalog sells them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from gateway.catalog.upstream_check import UpstreamFinding
from gateway.notices.kinds import OPERATOR, Notice

LISTED: Final = 20
"""Findings that a notice lists; the others are counted."""


def upstreams_changed(findings: Sequence[UpstreamFinding]) -> Notice:
    """Tell the operator what a check of the upstreams found; the same findings once."""
    lines = [f"{one.model}: {one.message}" for one in findings]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    models = len({one.model for one in findings})
    count = f"{models} model" + ("s" if models != 1 else "")
    listed = "\n".join(f"- {line}" for line in lines[:LISTED])
    more = f"\n- and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    return Notice(
        key=f"upstream:{digest}",
        account_id=OPERATOR,
        kind="upstream.changed",
        subject="catalog",
        title=f"The catalog differs from the upstreams of {count}",
        text=(
            f"What the upstreams publish of {count} contradicts the catalog. `tollgate upstream "
            f"check` lists everything.\n\n{listed}{more}"
        ),
        data={
            "findings": [{"model": one.model, "message": one.message} for one in findings[:LISTED]],
            "count": len(lines),
        },
        lasting=True,
    )
