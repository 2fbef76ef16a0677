"""The pages of the documentation agree with each other and with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticUndefined

from docs import generate
from gateway.catalog import schema
from gateway.catalog.schema import CatalogEntry, Limits
from gateway.settings import Settings
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links, name, prose, table
from workers.settings import WorkerSettings

REFERENCE = ROOT / "docs" / "reference"
UNPREFIXED = (
    "database_url",
    "redis_url",
    "blob_url",
    "stripe_api_key",
    "stripe_webhook_secret",
)
HISTORY = ("docs/decisions.md",)
LINE_MAX = 100


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in links(index)}

    pages = {page for page in PAGES if page not in (index, ROOT / "README.md")}
    assert {
        name(page) for page in pages - listed if "engines" not in page.parts or page.stem == "index"
    } == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_that_pages_name_exist(page: Path) -> None:
    tops = "gateway|workers|training|migrations|tests|docs|benchmarks"
    for path in re.findall(rf"`((?:{tops})/[\w/.-]*[\w/])`", prose(page)):
        if name(page) not in HISTORY:
            assert (ROOT / path).exists(), f"{name(page)}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page: Path) -> None:
    if name(page) not in HISTORY:
        text, *generated = re.split(r"<!-- (?:generated|end)[^>]*-->", prose(page))
        lines = [line for part in (text, *generated[1:]) for line in part.splitlines()]
        assert [line for line in lines if len(line) > LINE_MAX and line[0] != "|"] == []


def test_decisions_are_numbered_without_gaps() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()

    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("part", generate.PARTS)
def test_generated_parts_are_current(part: str) -> None:
    page = ROOT / "docs" / part

    assert generate.render(part) == page.read_text(), "run: make docs"


def test_every_error_code_has_one_meaning() -> None:
    assert set(generate.raised_codes()) == set(generate.meanings()[0])


@pytest.mark.parametrize(
    ("settings", "heading"), [(Settings, "## Gateway"), (WorkerSettings, "## Worker")]
)
def test_every_setting_is_listed_once_with_its_default(
    settings: type[Settings | WorkerSettings], heading: str
) -> None:
    expected = {}
    for field, info in settings.model_fields.items():
        variable = field.upper() if field in UNPREFIXED else f"TOLLGATE_{field.upper()}"
        default = "" if info.default in (None, PydanticUndefined) else str(info.default)
        if isinstance(info.default, bool):
            default = default.lower()
        expected[f"`{variable}`"] = f"`{default}`" if default else ""
    if settings is WorkerSettings:
        expected["`TOLLGATE_WORKER_NAME`"] = "`the host name`"

    rows = table(REFERENCE / "settings.md", heading)

    assert len(rows) == len({row[0] for row in rows})
    assert {row[0]: row[1] for row in rows} == expected
    assert all(row[2] for row in rows)


def test_every_field_of_the_catalog_is_listed() -> None:
    page = REFERENCE / "catalog.md"
    for model, heading in (
        (CatalogEntry, "## Entry"),
        (schema.PriceLine, "## Price"),
        (Limits, "## Limits"),
    ):
        listed = {field for row in table(page, heading) for field in re.findall(r"`(\w+)`", row[0])}
        assert listed == set(model.model_fields), heading


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_of_code_can_be_parsed(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "yaml":
                yaml.safe_load(block.text)
            case "json":
                json.loads(block.text)
            case "python":
                compile(block.text, name(page), "exec")
            case language:
                # A shell command belongs into a block `console`, of which tests run each command.
                assert language in ("console", "mermaid", "text", "nginx", "caddyfile")
