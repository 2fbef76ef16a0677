"""An order as it is carried out: server-sent events that the playground's scripts show.

Amounts and durations are texts. Previews are small, and travel in the events themselves.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.api.http.answers import KEEP_ALIVE, KEEP_ALIVE_S, event_data
from gateway.api.http.request import Services
from gateway.api.http.text_stream import TextDelta, TextStream, choices_of
from gateway.catalog.schema import CatalogEntry
from gateway.console.playground.orders import unknown_words
from gateway.console.playground.origins import next_tasks
from gateway.console.views.formats import duration, usd
from gateway.console.views.outputs import ShownMedium, shown_output
from gateway.console.views.requests import phases
from gateway.errors import TollgateError
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.steps import StepLine
from gateway.performance import real_time_factor
from gateway.requests.incremental_holds import CostSoFar
from gateway.requests.ticket import Ticket
from workers.contract.blobs import BlobError
from workers.contract.jobs import BlobRef, Preview, Progress, SentEvent

PREVIEW_BYTES_MAX: Final = 500_000


class OrderStream:
    """The events of one order."""

    def __init__(
        self, services: Services, ticket: Ticket, offered: Sequence[CatalogEntry], *, is_text: bool
    ) -> None:
        """``offered`` are the models that can go on from what is made."""
        self._services = services
        self._offered = offered
        self._ticket = ticket
        self._text = TextStream(ticket.request_id)
        self._cost = ticket.cost_so_far() if is_text else None
        self._path = f"/console/requests/{ticket.request_id}"

    async def events(self) -> AsyncIterator[bytes]:
        ticket, most = self._ticket, self._cost and usd(self._cost.most_nanos)
        with ticket:
            held = "" if ticket.hold_nanos is None else usd(ticket.hold_nanos)
            accepted = {
                "id": ticket.request_id, "path": self._path, "most": most or "", "held": held,
            }  # fmt: skip
            yield event_data(accepted, name="accepted")
            try:
                while (events := await ticket.next_events(KEEP_ALIVE_S)) is not None:
                    sent = [each for event in events async for each in self._show(event)]
                    yield b"".join(sent) or KEEP_ALIVE
                closed = ticket.result
                for delta in self._text.rest(choices_of(closed)):
                    yield _added(delta, None)
                yield event_data(await self._ended(closed), name="ended")
            except TollgateError as error:
                yield event_data({"message": error.message}, name="failed")

    async def _show(self, sent: SentEvent) -> AsyncIterator[bytes]:
        event = sent.event
        if isinstance(event, Progress):
            yield event_data(_progress(event), name="progress")
        elif isinstance(event, Preview):
            if (source := await self._source(event.blob)) is not None:
                shown = {"output": event.output, "index": event.index, "source": source}
                yield event_data(shown, name="preview")
        else:
            if self._cost is not None:
                self._cost.count(sent)
            if (delta := self._text.receive(sent)) is not None:
                yield _added(delta, self._cost)

    async def _source(self, blob: BlobRef) -> str | None:
        """Return a preview as a data URI; None if it is large, or already deleted."""
        if blob.bytes > PREVIEW_BYTES_MAX or not blob.content_type.startswith("image/"):
            return None
        try:
            data = await self._services.blobs.get(blob)
        except BlobError:
            return None
        return f"data:{blob.content_type};base64,{b64encode(data).decode()}"

    async def _ended(self, closed: ClosedRequest) -> dict[str, Any]:
        """Return the end of an order: what it cost, and what was made."""
        output = shown_output(closed)
        media = output.media if output else ()
        lookup = self._services.requests.lookup
        entry = self._services.live.entry(closed.model)
        steps: Sequence[StepLine] = ()
        if entry is not None and entry.workflow is not None:
            steps = (await lookup.receipt(closed.account_id, closed.request_id)).steps
        return {
            "status": closed.status,
            "message": closed.error.message if closed.error else "",
            "cost": usd(closed.cost_nanos) if closed.cost_nanos else "nothing",
            "held": usd(closed.hold_nanos),
            "released": usd(closed.hold_nanos - closed.cost_nanos),
            "phases": _phases(closed),
            "took": duration(closed.timings.total_us),
            "speed": speed_of(closed),
            "value": output.value if output else "",
            "tokens": msgspec.to_builtins(output.tokens) if output else [],
            "unknown": unknown_words(closed.warnings),
            "media": [
                {
                    "kind": one.kind,
                    "role": one.role,
                    "facts": one.facts,
                    "seed": one.seed,
                    "path": f"{self._path}/media/{one.position}",
                    "next": self._next(one, closed),
                }
                for one in media
                if one.stored and not one.error
            ],
            "steps": [_step(step) for step in steps],
        }

    def _next(self, one: ShownMedium, closed: ClosedRequest) -> list[Mapping[str, str]]:
        """Return what can be made of an output, as addresses of forms."""
        tasks = next_tasks(self._offered, one.kind) if one.role == "output" else ()
        return [
            {"label": each.label, "path": each.path(closed.request_id, one.position)}
            for each in tasks
        ]


def speed_of(closed: ClosedRequest) -> str:
    """Return how fast an answer came, in words; empty if that was not measured."""
    timings, found = closed.timings, []
    audio_ms = closed.usage.audio_ms
    if timings.first_token_us:
        found.append(
            f"first {'audio' if audio_ms else 'token'} after {duration(timings.first_token_us)}"
        )
    if audio_ms and (factor := real_time_factor(timings, audio_ms)):
        found.append(f"real-time factor {factor:g}")
    if timings.per_token_us and not audio_ms:
        found.append(f"{1_000_000 / timings.per_token_us:.1f} tokens/s")
    return ", ".join(found)


def _progress(progress: Progress) -> Mapping[str, Any]:
    stage = progress.stage
    eta_ms = progress.eta_ms
    return {
        "step": progress.step,
        "steps": progress.steps,
        "left": duration(eta_ms * 1000) if eta_ms else "",
        "stage": msgspec.to_builtins(stage) if stage else None,
    }


def _phases(closed: ClosedRequest) -> list[Mapping[str, str | float]]:
    """Return the phases that took time: how long, and their places on a bar in percent."""
    total, at = max(closed.timings.total_us, 1), 0
    found: list[Mapping[str, str | float]] = []
    for phase in phases(closed.timings):
        if phase.us:
            start, wide = 100 * at / total, max(100 * phase.us / total, 0.4)
            took = duration(phase.us)
            found.append({"name": phase.name, "took": took, "start": start, "wide": wide})
        at += phase.us
    return found


def _step(step: StepLine) -> Mapping[str, Any]:
    return {
        "name": step.name,
        "status": step.status,
        "cost": usd(step.charge_nanos),
        "took": duration(step.timings.total_us or None),
        "message": step.error.message if step.error else "",
    }


def _added(delta: TextDelta, cost: CostSoFar | None) -> bytes:
    """Return new text and calls of tools, with what the stream has cost so far."""
    shown: dict[str, Any] = {"text": delta.text, "index": delta.index}
    if cost is not None:
        shown |= {"cost": usd(cost.nanos), "tokens": cost.tokens}
    if delta.reasoning:
        shown["reasoning"] = delta.reasoning
    if delta.calls:
        shown["calls"] = msgspec.to_builtins(delta.calls)
    return event_data(shown, name="text")
