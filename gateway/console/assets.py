"""Serves the console's scripts, styles and icons from memory.

Every address contains a digest of all assets together, so that modules import each other by
relative names and a cached file never meets one of another version. Nothing is fetched from other
origins; ``assets/vendor.toml`` lists what is bundled.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Final

from litestar import Request, Response, get
from litestar.params import FromPath

from gateway.demo.script import read_portrait
from gateway.errors import NotFound

PATH: Final = "/console/assets"
PORTRAIT: Final = "portrait.png"
"""A picture to try models with, which is that of the demo."""
DIGEST_LENGTH: Final = 16
IMMUTABLE: Final = "public, max-age=31536000, immutable"
BUNDLES: Final[Mapping[str, tuple[str, ...]]] = {
    "htmx.js": ("vendor/htmx.js", "vendor/hx-csp.js"),
    "console.js": ("console.js", "parts.js"),
}
"""What every page needs, as few files: a first page takes five requests."""
_TYPES: Final[Mapping[str, str]] = {
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "png": "image/png",
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    zipped: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Assets:
    """All assets by name, such as ``vendor/htmx.js``, and the digest of their contents."""

    files: Mapping[str, Asset]
    digest: str

    def url(self, name: str) -> str:
        """Return the address of an asset. Raise ``KeyError`` if it does not exist."""
        if name not in self.files:
            raise KeyError(name)
        return f"{PATH}/{self.digest}/{name}"


@dataclass(frozen=True, slots=True)
class Package:
    """A bundled package."""

    name: str
    version: str
    licence: str
    source: str
    licence_file: str
    files: Mapping[str, str]
    """Digests (SHA-256) by name of the asset."""


@functools.cache
def load_assets() -> Assets:
    """Read and compress all assets, once per process."""
    folder = importlib.resources.files("gateway.console").joinpath("assets")
    contents = dict(sorted(_walk(folder, "")))
    contents[PORTRAIT] = read_portrait()
    contents |= {name: _bundled(contents, parts) for name, parts in BUNDLES.items()}
    whole = hashlib.sha256()
    for name, content in contents.items():
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    files = {
        name: Asset(content, gzip.compress(content, 9, mtime=0), _TYPES[_suffix(name)])
        for name, content in contents.items()
    }
    return Assets(files, whole.hexdigest()[:DIGEST_LENGTH])


def bundled_packages() -> list[Package]:
    """Read which packages are bundled, with their versions and licences."""
    folder = importlib.resources.files("gateway.console").joinpath("assets")
    found = tomllib.loads(folder.joinpath("vendor.toml").read_text("utf-8"))
    return [Package(**package) for package in found["package"]]


@get(
    "/assets/{digest:str}/{name:path}",
    opt={"open": True, "same_for_all": True},
    sync_to_thread=False,
)
def serve_asset(
    request: Request[Any, Any, Any], digest: FromPath[str], name: FromPath[str]
) -> Response[bytes]:
    """Serve an asset. A page of another version, during an upgrade, gets the file of this one."""
    assets = load_assets()
    asset = assets.files.get(name.lstrip("/"))
    if asset is None:
        raise NotFound("not_found", f"The console has no file {name.lstrip('/')!r}.")
    headers = {
        "Cache-Control": IMMUTABLE if digest == assets.digest else "no-cache",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    content = asset.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = asset.zipped, "gzip"
    return Response(content, media_type=asset.media_type, headers=headers)


HANDLERS: Final[list[Any]] = [serve_asset]


def _bundled(contents: Mapping[str, bytes], parts: Sequence[str]) -> bytes:
    """Join scripts; their imports, which are of each other, are not needed then."""
    lines = b"\n".join(contents[part] for part in parts).split(b"\n")
    return b"\n".join(line for line in lines if not line.startswith(b"import "))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        name = f"{prefix}{one.name}"
        if one.is_dir():
            yield from _walk(one, f"{name}/")
        elif _suffix(name) in _TYPES:
            yield name, one.read_bytes()


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
