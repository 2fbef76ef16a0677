"""Fixtures of the principle tests: the shared stack of the gateway's tests."""

from __future__ import annotations

from tests.gateway.conftest import shared_stack as shared_stack
from tests.gateway.conftest import stack as stack
