"""Sends notices to their subscriptions: signed webhooks, and mail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal, TypedDict

import httpx

from gateway import metrics
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.notices.confirmation import confirmation_token
from gateway.notices.failing import tell_of_failures
from gateway.notices.kinds import CONFIRMATION, OPERATOR
from gateway.notices.mail import Mailer
from gateway.notices.store import OUTBOX, StoredNotice, find_notice
from gateway.notices.subscriptions import address_of
from gateway.sql.database import Database
from gateway.webhooks.outbox import Claimed
from gateway.webhooks.sender import Poster, ReceiverAnswer, Sender, SendFailed, Turn

_OUTCOMES: Final = {"delivered": "sent", "gone": "failed", "failed": "failed"}


class NoticeSender(Sender):
    """The loop that sends due notices, with the retries of webhooks."""

    poll_s = 5.0

    def __init__(
        self, database: Database, *, poster: Poster, mailer: Mailer | None, pepper: bytes
    ) -> None:
        super().__init__(database, OUTBOX, given_up=tell_of_failures)
        self._pepper = pepper
        self._poster = poster
        self._mailer = mailer

    async def send(self, client: httpx.AsyncClient, one: Claimed) -> ReceiverAnswer:
        told = await self._database.read(lambda connection: find_notice(connection, one.id))
        if told is None:
            raise NotFound("not_found", "The notice was deleted.")
        to = address_of(one.url)
        if to is None:
            event = {
                "type": told.kind,
                "timestamp": timestamp(told.created_at),
                "data": notice_event(told),
            }
            return await self._poster.post(client, one, event, id=told.id)
        if self._mailer is None:
            raise SendFailed("no_mail_server")
        if told.kind == CONFIRMATION:
            token = confirmation_token(self._pepper, one.account_id, one.url)
            told = replace(told, text=f"{told.text}\n\n{token}")
        return ReceiverAnswer(await self._mailer.send(to, told, id=one.id))

    def count(self, turn: Turn) -> None:
        for (outcome, kind), number in turn.ends.items():
            metrics.NOTICES.labels(kind, _OUTCOMES[outcome]).inc(number)

    def observe(self, error: str | None, duration_s: float) -> None:
        metrics.NOTICE_SECONDS.labels(error or "none").observe(duration_s)


class NoticeEvent(TypedDict):
    """A notice as it is sent. ``account_id`` is null if it is for the operator."""

    object: Literal["notice"]
    id: str
    kind: str
    account_id: int | None
    subject: str
    title: str
    text: str
    data: dict[str, Any]
    created_at: str


def notice_event(told: StoredNotice) -> NoticeEvent:
    """Return what is sent of a notice, and shown of it in lists."""
    return {
        "object": "notice",
        "id": told.id,
        "kind": told.kind,
        "account_id": None if told.account_id == OPERATOR else told.account_id,
        "subject": told.subject,
        "title": told.title,
        "text": told.text,
        "data": dict(told.data),
        "created_at": timestamp(told.created_at),
    }
