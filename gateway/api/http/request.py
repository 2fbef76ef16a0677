"""The request class of handlers: checked bodies, the authenticated caller, typed services."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import FormMultiDict, UploadFile

from gateway.accounts.attempts import Attempts
from gateway.accounts.keys import KeyInfo
from gateway.accounts.rates import Rates
from gateway.accounts.refused_attempts import RefusedAttempts
from gateway.accounts.visitors import Visitors
from gateway.api.http.access import Access
from gateway.api.http.large_bodies import Bodies
from gateway.batches.runner import Runner
from gateway.billing.usage.today import TodayUsage
from gateway.billing.usage.traffic import TrafficHour
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.store import LiveCatalog
from gateway.checks.decoding import check_text, refuse_null, unreadable
from gateway.files.download_urls import UrlSigner
from gateway.files.retention import MediaStore
from gateway.files.room import Room
from gateway.files.store import Files
from gateway.files.upload_urls import UploadUrls
from gateway.operations.running.gateways import Gateways
from gateway.operations.running.server import QueueServer
from gateway.payments.provider import PaymentProvider
from gateway.performance import Performance
from gateway.readiness import Readiness
from gateway.requests.caller import Caller
from gateway.requests.service import Requests
from gateway.retention.erasure import Eraser
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.supervision import Supervisor
from gateway.voices.store import Voices
from workers.contract.blobs import Blobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Services that handlers and guards call; built when the application starts."""

    settings: Settings
    database: Database
    live: LiveCatalog
    requests: Requests
    supervisor: Supervisor
    readiness: Readiness
    blobs: Blobs
    files: Files
    room: Room
    bodies: Bodies
    media: MediaStore
    links: UrlSigner
    upload_urls: UploadUrls
    voices: Voices
    batches: Runner
    rates: Rates
    performance: Performance
    pepper: bytes
    payment_provider: PaymentProvider | None
    eraser: Eraser
    access: Access
    refused: RefusedAttempts
    visitors: Visitors
    attempts: Attempts
    traffic: TrafficHour
    today: TodayUsage
    queue_server: QueueServer
    gateways: Gateways


def services_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    services: Services = connection.app.state.services
    return services


class ApiRequest(Request[Any, Any, Any]):
    """A request with its services and its caller.

    The JSON or form in its body contains no text that cannot be stored.
    """

    @property
    def services(self) -> Services:
        services: Services = self.scope["litestar_app"].state.services
        return services

    @property
    def caller(self) -> Caller:
        caller: Caller = self.scope["state"]["call"]
        return caller

    @property
    def key(self) -> KeyInfo:
        """The key that authenticated this call."""
        caller: Caller = self.scope["state"]["call"]
        return caller.key

    def header(self, name: bytes) -> str | None:
        """Return a header by its name in lower case, without decoding the others."""
        for found, value in self.scope["headers"]:
            if found == name:
                return value.decode("latin-1")
        return None

    def keep_body(self, body: bytes) -> None:
        """Use a body that was received already."""
        self._body = body

    def entries(self) -> tuple[CatalogEntry, ...]:
        """Return the models that the caller's key may use, at its account's prices."""
        key = self.key
        found = self.services.live.entries(key.account_id)
        return found if key.models is None else tuple(e for e in found if e.name in key.models)

    def find(self, name: str) -> CatalogEntry | None:
        """Return a model at the price of the caller's account, whether or not its key may use it:
        a workflow's price includes all of its steps."""
        return self.services.live.entry(name, self.key.account_id)

    async def json(self) -> Any:
        try:
            value = await super().json()
        except (RecursionError, UnicodeDecodeError) as error:
            raise unreadable(error) from None
        refuse_null(await self.body(), value)
        return value

    async def form(self) -> FormMultiDict:
        try:
            form = await super().form()
        except UnicodeDecodeError as error:
            raise unreadable(error) from None
        for name, value in form.multi_items():
            check_text(name, "")
            if isinstance(value, UploadFile):
                check_text(value.filename, name)
            elif isinstance(value, str):
                check_text(value, name)
        return form
