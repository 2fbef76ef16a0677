"""Endpoints of administrators: they adapt ``gateway.operations`` to HTTP."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.admin.accounts import AccountsController
from gateway.api.admin.audit import AuditController
from gateway.api.admin.catalog import CatalogFileController
from gateway.api.admin.credit import CreditController
from gateway.api.admin.erasure import ErasureController, RetentionController
from gateway.api.admin.keys import KeysController
from gateway.api.admin.limits import AdminLimitsController
from gateway.api.admin.maintenance import AdminController
from gateway.api.admin.margins import MarginsController
from gateway.api.admin.notices import AdminNoticesController
from gateway.api.admin.organisations import (
    OrganisationExportsController,
    OrganisationsController,
)
from gateway.api.admin.periods import AdminPeriodsController
from gateway.api.admin.plan import PlanController
from gateway.api.admin.prices import PricesController
from gateway.api.admin.running import QueuesController, RunningController, WorkersController
from gateway.api.admin.set_aside import SetAsideController
from gateway.api.admin.users import UsersController

HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    AccountsController,
    KeysController,
    CreditController,
    AdminController,
    CatalogFileController,
    PricesController,
    SetAsideController,
    AdminLimitsController,
    AdminPeriodsController,
    AuditController,
    UsersController,
    ErasureController,
    RetentionController,
    AdminNoticesController,
    OrganisationsController,
    OrganisationExportsController,
    MarginsController,
    PlanController,
    WorkersController,
    QueuesController,
    RunningController,
)
