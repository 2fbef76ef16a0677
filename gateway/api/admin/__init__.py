"""What only administrators may call: accounts, keys, credit, prices, maintenance."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.admin.credit import CreditController
from gateway.api.admin.maintenance import AdminController
from gateway.api.admin.prices import PricesController
from gateway.api.admin.set_aside import SetAsideController
from gateway.api.native.limits import AdminLimitsController
from gateway.api.native.statements import AdminPeriodsController

HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    CreditController,
    AdminController,
    PricesController,
    SetAsideController,
    AdminLimitsController,
    AdminPeriodsController,
)
