"""Roles: what administrators, and the members of accounts, may do. One table; pure.

A key with the scope ``admin`` has a role, and a person has one of the installation and any number
of accounts. Whoever runs commands has the database, and is an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

from gateway.errors import Forbidden

Role: TypeAlias = Literal["operator", "finance", "auditor"]
"""Role in the installation."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
MemberRole: TypeAlias = Literal["owner", "member", "viewer"]
"""Role in an account; each may do what the following ones may."""
MEMBER_ROLES: Final[tuple[MemberRole, ...]] = get_args(MemberRole)
Area: TypeAlias = Literal[
    "accounts",
    "terms",
    "keys",
    "users",
    "credit",
    "budgets",
    "limits",
    "prices",
    "catalog",
    "ledger",
    "periods",
    "usage",
    "requests",
    "webhooks",
    "notices",
    "set_aside",
    "workers",
    "audit",
    "erasure",
]
Right: TypeAlias = Literal["", "read", "write"]


def _rights(operator: Right, finance: Right, auditor: Right) -> Mapping[Role, Right]:
    return {"operator": operator, "finance": finance, "auditor": auditor}


AREAS: Final[Mapping[Area, Mapping[Role, Right]]] = {
    "accounts": _rights("write", "read", "read"),
    # Credit limit and allowance of an account.
    "terms": _rights("write", "write", "read"),
    "keys": _rights("write", "", "read"),
    "users": _rights("write", "", "read"),
    "credit": _rights("write", "write", "read"),
    "budgets": _rights("write", "write", "read"),
    "limits": _rights("write", "read", "read"),
    "prices": _rights("write", "write", "read"),
    "catalog": _rights("write", "read", "read"),
    "ledger": _rights("write", "write", "read"),
    "periods": _rights("write", "write", "read"),
    "usage": _rights("read", "read", "read"),
    "requests": _rights("read", "read", "read"),
    "webhooks": _rights("write", "", "read"),
    "notices": _rights("write", "write", "read"),
    "set_aside": _rights("write", "read", "read"),
    # Workers, queues, upstreams and gateways.
    "workers": _rights("write", "read", "read"),
    "audit": _rights("read", "read", "read"),
    "erasure": _rights("write", "", "read"),
}
"""What each role may do: ``write`` includes ``read``."""

ACT_AREAS: Final[Mapping[str, Area]] = {
    "account": "accounts",
    "organisation": "accounts",
    "key": "keys",
    "access": "users",
    "user": "users",
    "member": "users",
    "link": "users",
    "session": "users",
    "credit": "credit",
    "payment": "credit",
    "invoice": "credit",
    "budget": "budgets",
    "limit": "limits",
    "storage": "limits",
    "price": "prices",
    "rebate": "periods",
    "catalog": "catalog",
    "ledger": "ledger",
    "period": "periods",
    "webhook": "webhooks",
    "notice": "notices",
    "set_aside": "set_aside",
    "worker": "workers",
    "queue": "workers",
    "audit": "audit",
    "database": "accounts",
    "retention": "accounts",
    "erasure": "erasure",
}
"""Area of each kind of act: of ``account.change``, the one of ``account``."""


def least_role(scope: str, declared: MemberRole | None) -> MemberRole:
    """Return the least role of members that a route of an account needs: what reads needs a viewer,
    anything else a member, unless the route declares another."""
    return declared or ("viewer" if scope == "read" else "member")


def check_member(role: MemberRole, least: MemberRole) -> None:
    """Raise ``Forbidden`` if a member's role is less than the least that a route needs."""
    if MEMBER_ROLES.index(role) > MEMBER_ROLES.index(least):
        others = " or ".join(MEMBER_ROLES[: MEMBER_ROLES.index(least) + 1])
        raise Forbidden(
            "role_not_allowed",
            f"The role {role} of this key's member may not do this; it needs {others}.",
        )


def area_of(act: str) -> Area:
    return ACT_AREAS[act.partition(".")[0]]


def may(role: Role, area: Area, *, write: bool) -> bool:
    return AREAS[area][role] in (("write",) if write else ("read", "write"))


def check_role(role: Role, area: Area, *, write: bool) -> None:
    """Raise ``Forbidden`` if a role may not read or write an area."""
    if not may(role, area, write=write):
        others = ", ".join(one for one in ROLES if may(one, area, write=write))
        raise Forbidden(
            "role_not_allowed",
            f"The role {role} may not {'change' if write else 'read'} this ({area}); "
            f"allowed: {others or 'none'}.",
        )
