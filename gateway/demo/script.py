"""Reads ``script.yaml``: the accounts, usual requests and orders of the demonstration."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import yaml

from workers.contract.jobs import Timings, Usage

HERE: Final = importlib.resources.files("gateway.demo")
Body = dict[str, Any]
"""Fields of an operation's body, as over HTTP."""


class DemoAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An account. ``history`` is its number of requests on an older day."""

    name: str
    keys: Sequence[Body]
    credit: Sequence[Body]
    history: int
    models: Mapping[str, int]
    """How often each model is used, relative to the others."""
    members: Sequence[Body] = ()
    budgets: Sequence[Body] = ()
    limits: Sequence[Body] = ()
    prices: Sequence[Body] = ()
    zone: str = "UTC"
    credit_limit: str = "0"
    chargeback: Body | None = None


class DemoOrganisation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    accounts: Sequence[str]
    budget: Body


class DemoKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's usual request of older days."""

    limits: Usage
    usage: Usage
    timings: Timings


class DemoOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of today; ``$name`` in its input stands for a file or a prompt."""

    account: str
    key: str
    model: str
    input: Body
    times: int = 1
    prompts: Sequence[str] = ()
    tag: str | None = None
    webhook: str | None = None
    keep: str | None = None
    ends: Literal["succeeded", "failed", "cancelled", "refused"] = "succeeded"


class DemoVoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    account: str
    key: str
    model: str
    name: str
    consent: str


class DemoBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    account: str
    key: str
    model: str
    prompts: Sequence[str]


class DemoRefund(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    account: str
    model: str
    reason: str


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    users: Sequence[Body]
    organisation: DemoOrganisation
    accounts: Sequence[DemoAccount]
    scheduled_prices: Sequence[Body]
    earlier_prices: Sequence[Body]
    kinds: Mapping[str, DemoKind]
    tags: Sequence[str]
    orders: Sequence[DemoOrder]
    voice: DemoVoice
    batch: DemoBatch
    refund: DemoRefund


def read_script() -> Script:
    text = HERE.joinpath("script.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), Script)


def read_portrait() -> bytes:
    """Return the picture that the talking heads show, as PNG."""
    return HERE.joinpath("portrait.png").read_bytes()
