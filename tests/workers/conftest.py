"""Settings of the worker tests."""

from __future__ import annotations

from hypothesis import settings

# No test asserts a duration: the machine may be busy with other things.
settings.register_profile("workers", deadline=None)
settings.load_profile("workers")
