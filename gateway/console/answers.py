"""Answers that are not pages."""

from __future__ import annotations

from litestar.response import Redirect


def see_other(path: str) -> Redirect:
    """Send the browser on after a form, so that reloading does not send the form again."""
    return Redirect(path, status_code=303)
