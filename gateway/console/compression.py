"""Compresses pages, but for a browser only that was sent there by the console or by its user.

The length of a compressed page depends on what its texts have in common. A page of another site
could make a browser load ours with texts of its choice (a filter, ``next``), watch the lengths, and
guess what else is on it, a byte at a time (BREACH). That is kept out in three ways:

- A call of another site, or of another port of this host, gets the page uncompressed. Browsers
  state that in ``Sec-Fetch-Site``, which scripts cannot set. Without the header nothing is
  compressed.
- Pages that show a secret (a new key, a link, a webhook's secret, the entrance) are not compressed.
- The token of forms, which is on every page, has a new mask on each (``csrf.masked``).

zlib's level 5 takes 1.5 ms of a core for a page of 100 kB, which becomes 10 kB, and 0.6 ms for one
of 32 kB, within the thread that renders it. Level 9 takes 60 % more time, for 5 % fewer bytes.
"""

from __future__ import annotations

import gzip
from typing import Final

from gateway.api.http.request import ApiRequest

LEVEL: Final = 5
LEAST_BYTES: Final = 1_000
"""Size from which a page is compressed; smaller ones fit a packet anyway."""
OWN_SITES: Final = ("same-origin", "none")
VARY: Final = "Accept-Encoding, Sec-Fetch-Site, HX-Request"
"""Headers of a call on which a page depends."""


def compressed(request: ApiRequest, content: bytes) -> bytes | None:
    """Return the content of a page without a secret, compressed; None if it is sent as it is."""
    headers = request.headers
    if len(content) < LEAST_BYTES or headers.get("sec-fetch-site") not in OWN_SITES:
        return None
    if "gzip" not in headers.get("accept-encoding", ""):
        return None
    return gzip.compress(content, LEVEL, mtime=0)
