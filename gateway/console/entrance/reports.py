"""Receives what browsers report about violations of the content security policy."""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec
from litestar import post

from gateway.api.http.request import ApiRequest
from gateway.errors import InvalidRequest
from gateway.metrics import CSP_REPORTS

log = logging.getLogger(__name__)

BYTES_MAX: Final = 16 * 1024
LOGGED_PER_MINUTE: Final = 10
DIRECTIVES: Final = (
    frozenset(
        f"{name}-src" for name in ("default", "script", "style", "img", "media", "connect", "font")
    )
    | {"script-src-elem", "script-src-attr", "style-src-elem", "style-src-attr", "worker-src"}
    | {
        "form-action",
        "base-uri",
        "frame-ancestors",
        "object-src",
        "require-trusted-types-for",
        "trusted-types",
    }
)


class _Report(msgspec.Struct, rename="kebab"):
    effective_directive: str = ""
    violated_directive: str = ""


class _Envelope(msgspec.Struct, rename="kebab"):
    csp_report: _Report


class _Log:
    """Logs a few reports per minute, since anybody can send them."""

    def __init__(self) -> None:
        self._minute, self._count = 0, 0

    def write(self, directive: str) -> bool:
        """Log a report; return whether it was within the bound."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count > LOGGED_PER_MINUTE:
            return False
        log.warning("a browser reported a violation of the console's policy: %s", directive)
        return True


_log: Final = _Log()


@post(
    "/csp",
    opt={"open": True, "reports": True},
    status_code=204,
    request_max_body_size=BYTES_MAX,
)
async def receive_report(request: ApiRequest) -> None:
    try:
        report = msgspec.json.decode(await request.body(), type=_Envelope).csp_report
    except msgspec.DecodeError:
        raise InvalidRequest("invalid_json", "The report is not valid.") from None
    sent = report.effective_directive or report.violated_directive.partition(" ")[0]
    directive = sent if sent in DIRECTIVES else "other"
    CSP_REPORTS.labels(directive).inc()
    if _log.write(directive):
        await request.services.attempts.reports.add(directive)
