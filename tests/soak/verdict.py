"""Compares the books with the clients' own sums after the run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import httpx

from gateway.ledger.reconcile import reconcile
from gateway.sql.database import Database
from tests.soak.clients import ENDED, Act, Client
from tests.soak.ground import CREDIT, Ground

SETTLED_S: Final = 240.0
"""Longer than any deadline and its grace."""


async def settled(ground: Ground, client: Client) -> list[dict[str, Any]]:
    """Wait until every request of an account has ended; return them all."""
    deadline = asyncio.get_running_loop().time() + SETTLED_S
    while True:
        try:
            found = await _all(client)
        except httpx.HTTPError:
            found = [{"id": "?", "status": "unknown"}]
        left = [each for each in found if each["status"] not in ENDED]
        if not left or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(1)


async def _all(client: Client) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {client.account.secret}"}
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        answer = await client.http.get(
            client.url + "/v1/requests",
            params={"limit": 500, **({"cursor": cursor} if cursor else {})},
            headers=headers,
        )
        answer.raise_for_status()
        found += answer.json()["data"]
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return found


async def compare(client: Client, found: list[dict[str, Any]]) -> list[str]:
    """Compare what one account's clients received with what the gateway has recorded."""
    wrong = list(client.violations)
    by_id = {each["id"]: each for each in found}
    by_act: defaultdict[str, list[str]] = defaultdict(list)
    for each in found:
        if each["status"] not in ENDED:
            wrong.append(f"{each['id']} ({each['model']}) is still {each['status']}")
        # One that was answered 503 while its hold was committed is taken back, for nothing.
        taken_back = each["status"] == "cancelled" and not Decimal(each["cost"] or 0)
        if (act := (each.get("metadata") or {}).get("act")) and not taken_back:
            by_act[act].append(each["id"])
    for act in client.acts:
        wrong += _wrong_of(act, by_id, by_act[act.name], client.ground.wipes)
    posts, ran = sum(act.posts for act in client.acts), sum(map(len, by_act.values()))
    if ran > posts:
        wrong.append(f"{ran} requests of {posts} submissions")
    headers = {"Authorization": f"Bearer {client.account.secret}"}
    balance = (await client.http.get(client.url + "/v1/balance", headers=headers)).json()
    spent = sum((Decimal(each["cost"] or 0) for each in found), Decimal(0))
    if Decimal(balance["posted"]) != Decimal(CREDIT) - spent:
        wrong.append(f"the balance is {balance['posted']}, but {spent} of {CREDIT} were spent")
    if Decimal(balance["held"]):
        wrong.append(f"{balance['held']} are still held")
    return wrong


def _wrong_of(
    act: Act, by_id: dict[str, dict[str, Any]], ran: list[str], wipes: Sequence[datetime]
) -> list[str]:
    wrong = []
    if act.key is not None and len(set(ran)) > 1:
        wrong.append(f"{act.kind}: one name, {len(ran)} requests: {ran}")
    if len(ran) > max(act.posts, 1):
        states = [f"{id} {by_id[id]['status']} {by_id[id]['cost']}" for id in ran]
        wrong.append(f"{act.kind}: sent {act.posts} times, ran {len(ran)} times: {states}")
    for request_id, cost in act.told.items():
        found = by_id.get(request_id)
        if found is None:
            wrong.append(f"{act.kind}: {request_id} was told of and is not there")
            continue
        if cost is not None and Decimal(cost) != Decimal(found["cost"] or 0):
            wrong.append(f"{act.kind}: {request_id} cost {cost} as told, {found['cost']} as booked")
        charged = Decimal(found["cost"] or 0)
        if act.result == "200" and not charged:
            wrong.append(f"{act.kind}: {request_id} was answered and is free")
        if found["status"] != "succeeded" and _was_open_at(found, wipes):
            # Its event log was wiped. What a lost log contained is free.
            continue
        used = (found.get("usage") or {}).get("output_tokens", 0)
        if act.kind == "chat stream" and act.words and not charged:
            wrong.append(
                f"{act.kind}: {request_id} delivered {act.words} words and is free "
                f"({found['status']}, {found.get('reason')})"
            )
        elif act.kind == "chat stream" and found["model"] != "pocket-chat" and used < act.words:
            wrong.append(
                f"{act.kind}: {request_id} delivered {act.words} words, charged for {used}"
            )
        if act.pictures and not charged:
            wrong.append(
                f"{act.kind}: {request_id} delivered {act.pictures} previews and is free "
                f"({found['status']}, {found.get('reason')})"
            )
    return wrong


def _was_open_at(found: dict[str, Any], moments: Sequence[datetime]) -> bool:
    begin = datetime.fromisoformat(found["created_at"])
    end = datetime.fromisoformat(found["settled_at"]) if found.get("settled_at") else None
    return any(begin <= moment and (end is None or moment <= end) for moment in moments)


def audit(ground: Ground) -> list[str]:
    """What the nightly proof finds."""
    database = Database(ground.database_url)
    try:
        with database.transaction() as connection:
            return [str(each) for each in reconcile(connection, now=datetime.now(UTC))]
    finally:
        database.dispose()
