"""The native API: requests of every task, feedback, receipts, usage, limits, uploads, notices."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.native.accounts import AccountController
from gateway.api.native.blobs import BlobsController
from gateway.api.native.catalog import CatalogController
from gateway.api.native.exports import ExportsController
from gateway.api.native.feedback import FeedbackController
from gateway.api.native.keys import OwnKeysController
from gateway.api.native.ledger import LedgerController
from gateway.api.native.limits import LimitsController
from gateway.api.native.lists import ListsController
from gateway.api.native.notices import NoticesController
from gateway.api.native.payments import PaymentsController, ProviderEventsController
from gateway.api.native.requests import RequestsController
from gateway.api.native.statements import StatementsController
from gateway.api.native.storage import StorageController
from gateway.api.native.uploads import UploadsController
from gateway.api.native.usage import UsageController
from gateway.api.native.webhooks import WebhooksController

HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    AccountController,
    BlobsController,
    CatalogController,
    ExportsController,
    FeedbackController,
    LedgerController,
    LimitsController,
    ListsController,
    NoticesController,
    OwnKeysController,
    PaymentsController,
    ProviderEventsController,
    StatementsController,
    StorageController,
    UsageController,
    WebhooksController,
)

MEDIA_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (RequestsController, UploadsController)
"""Handlers whose bodies can contain files."""
