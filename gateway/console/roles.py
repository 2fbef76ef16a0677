"""What each role may do in the console: one table. Pure.

Rights of roles in the installation are those of ``gateway.accounts.roles.AREAS``, and those of
members follow the least role, as for calls of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from gateway.accounts.roles import MEMBER_ROLES, ROLES, Area, MemberRole, Role, may

AnyRole: TypeAlias = Role | MemberRole
Act: TypeAlias = Literal[
    "own.write",
    "installation.read",
    "installation.write",
    "requests.read",
    "requests.write",
    "contents.read",
    "access.read",
    "access.write",
    "access.ask",
    "credit.read",
    "credit.write",
    "prices.read",
    "prices.write",
    "margins.read",
    "catalog.read",
    "catalog.write",
    "catalog_file.read",
    "accounts.read",
    "accounts.write",
    "terms.write",
    "organisations.read",
    "organisations.write",
    "organisation_budgets.write",
    "keys.read",
    "keys.write",
    "admin_keys.write",
    "users.read",
    "users.write",
    "members.read",
    "members.write",
    "budgets.read",
    "budgets.write",
    "limits.read",
    "limits.write",
    "play.read",
    "play.write",
    "files.read",
    "files.write",
    "files.delete",
    "batches.read",
    "batches.write",
    "voices.read",
    "voices.write",
    "payments.read",
    "payments.write",
    "ledger.read",
    "ledger.write",
    "usage.read",
    "periods.read",
    "periods.write",
    "webhooks.read",
    "webhooks.write",
    "notices.read",
    "notices.write",
    "set_aside.read",
    "set_aside.write",
    "erasures.read",
    "erasures.write",
    "retention.write",
    "audit.read",
    "settings.read",
]


def _roles(
    area: Area | None, right: Literal["read", "write"], least: MemberRole | None
) -> frozenset[AnyRole]:
    """Return the roles of the installation with a right to an area, and the members who have at
    least a role in their own account."""
    installation = [each for each in ROLES if area and may(each, area, write=right == "write")]
    count = 0 if least is None else MEMBER_ROLES.index(least) + 1
    return frozenset([*installation, *MEMBER_ROLES[:count]])


MAY: Final[Mapping[Act, frozenset[AnyRole]]] = {
    "own.write": frozenset([*ROLES, *MEMBER_ROLES]),
    # Overview, workers, queue, upstreams, gateways.
    "installation.read": _roles("workers", "read", None),
    "installation.write": _roles("workers", "write", None),
    "requests.read": _roles("requests", "read", "viewer"),
    "requests.write": _roles(None, "write", "member"),
    # What was said and made; no role of the installation sees it, but an operator where and as long
    # as an owner has given sight of it (``Visitor.may``).
    "contents.read": _roles(None, "read", "viewer"),
    "access.read": frozenset(["operator", "auditor", *MEMBER_ROLES]),
    "access.write": _roles(None, "write", "owner"),
    "access.ask": frozenset(["operator"]),
    "credit.read": _roles("credit", "read", "viewer"),
    "credit.write": _roles("credit", "write", None),
    "prices.read": _roles("prices", "read", "viewer"),
    "prices.write": _roles("prices", "write", None),
    "margins.read": _roles("usage", "read", None),
    "catalog.read": _roles("catalog", "read", "viewer"),
    "catalog.write": _roles("catalog", "write", None),
    # The file, with what upstreams cost, and plans.
    "catalog_file.read": _roles("catalog", "read", None),
    "accounts.read": _roles("accounts", "read", "viewer"),
    "accounts.write": _roles("accounts", "write", None),
    "terms.write": _roles("terms", "write", None),
    "organisations.read": _roles("accounts", "read", None),
    "organisations.write": _roles("accounts", "write", None),
    "organisation_budgets.write": _roles("budgets", "write", None),
    "keys.read": _roles("keys", "read", "viewer"),
    "keys.write": _roles("keys", "write", "owner"),
    "admin_keys.write": _roles("keys", "write", None),
    "users.read": _roles("users", "read", None),
    "users.write": _roles("users", "write", None),
    "members.read": _roles("users", "read", "owner"),
    "members.write": _roles("users", "write", "owner"),
    "budgets.read": _roles("budgets", "read", "viewer"),
    "budgets.write": _roles("budgets", "write", "owner"),
    "limits.read": _roles("limits", "read", "viewer"),
    "limits.write": _roles("limits", "write", None),
    "play.read": _roles(None, "read", "viewer"),
    "play.write": _roles(None, "write", "member"),
    "files.read": _roles(None, "read", "viewer"),
    "files.write": _roles(None, "write", "member"),
    "files.delete": _roles(None, "write", "owner"),
    "batches.read": _roles(None, "read", "viewer"),
    "batches.write": _roles(None, "write", "member"),
    "voices.read": _roles(None, "read", "viewer"),
    "voices.write": _roles(None, "write", "owner"),
    "payments.read": _roles("credit", "read", "owner"),
    "payments.write": _roles(None, "write", "owner"),
    "ledger.read": _roles("ledger", "read", "viewer"),
    "ledger.write": _roles("ledger", "write", None),
    "usage.read": _roles("usage", "read", "viewer"),
    "periods.read": _roles("periods", "read", "viewer"),
    "periods.write": _roles("periods", "write", None),
    "webhooks.read": _roles("webhooks", "read", "viewer"),
    "webhooks.write": _roles("webhooks", "write", "owner"),
    "notices.read": _roles("notices", "read", "viewer"),
    "notices.write": _roles("notices", "write", "owner"),
    "set_aside.read": _roles("set_aside", "read", None),
    "set_aside.write": _roles("set_aside", "write", None),
    "erasures.read": _roles("erasure", "read", None),
    "erasures.write": _roles("erasure", "write", None),
    "retention.write": _roles("accounts", "write", None),
    "audit.read": _roles("audit", "read", "owner"),
    "settings.read": frozenset(["operator", "auditor"]),
}
"""The roles that may do each act: members in their own accounts."""
