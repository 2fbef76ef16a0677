"""Bundled assets are the published ones, small, and served from memory."""

from __future__ import annotations

import gzip
import hashlib

from gateway.console.assets import IMMUTABLE, bundled_packages, load_assets
from tests.console.visiting import Installation

SHELL = ("htmx.js", "console.js")
"""Scripts of every page."""
PERMISSIVE = {"0BSD", "MIT"}


def test_bundled_files_are_those_that_were_published() -> None:
    assets = load_assets()
    found = {
        name: hashlib.sha256(asset.content).hexdigest()
        for name, asset in assets.files.items()
        if name.startswith("vendor/")
    }

    listed = {name: digest for each in bundled_packages() for name, digest in each.files.items()}
    assert found == listed


def test_each_bundled_package_has_its_licence() -> None:
    assets = load_assets()

    for package in bundled_packages():
        assert package.licence in PERMISSIVE
        assert b"Permission" in assets.files[package.licence_file].content


def test_pages_load_little() -> None:
    zipped = {name: len(asset.zipped) for name, asset in load_assets().files.items()}

    assert sum(zipped[name] for name in SHELL) < 30_000
    assert zipped["console.css"] < 14_000
    assert sum(size for name, size in zipped.items() if name.endswith(".js")) < 120_000


def test_assets_are_immutable_and_compressed(installation: Installation) -> None:
    browser, assets = installation.browser(), load_assets()

    for name, asset in assets.files.items():
        answer = browser.get(assets.url(name), **{"Accept-Encoding": "gzip"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(asset.media_type)
        assert answer.headers["cache-control"] == IMMUTABLE
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == asset.content
        assert gzip.decompress(asset.zipped) == asset.content


def test_page_of_another_version_gets_a_file_that_is_not_kept(installation: Installation) -> None:
    answer = installation.browser().get("/console/assets/0123456789abcdef/console.css")

    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-cache"


def test_unknown_asset_does_not_exist(installation: Installation) -> None:
    for name in ("nothing.js", "../app.py", "vendor.toml"):
        answer = installation.browser().get(f"/console/assets/{load_assets().digest}/{name}")
        assert answer.status_code == 404
