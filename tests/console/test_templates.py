"""Rules of templates, on which the console's safety rests. Read from their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gateway.console

FOLDER = Path(gateway.console.__file__).parent
TEMPLATES = sorted((FOLDER / "templates").rglob("*.html"))
SCRIPTS = sorted(path for path in (FOLDER / "assets").rglob("*.js") if "vendor" not in path.parts)
FORBIDDEN = {
    r"\|\s*safe\b": "unescaped text",
    r"\bMarkup\b": "unescaped text",
    r"autoescape\s+false": "unescaped text",
    r"\sstyle\s*=": "an inline style, which the policy blocks",
    r"\son[a-z]+\s*=": "an inline handler, which the policy blocks",
    r"hx-on": "an inline handler, which the policy blocks",
    r"\bjs:": "code in an attribute",
    r"javascript:": "code in an address",
    r"<style\b": "an inline style, which the policy blocks",
    r"https?://": "another origin",
    r"\bconfirm\(": "a dialog of the browser",
}
UNSAFE_SCRIPT = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")


class Elements(HTMLParser):
    """Collects elements with their attributes; what Jinja writes stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def without_statements(source: str) -> str:
    return re.sub(r"\{[%#].*?[%#]\}", "", source, flags=re.S)


def elements(source: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(without_statements(source))
    yield from parser.found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template_has_nothing_that_the_policy_forbids(path: Path) -> None:
    source = without_statements(path.read_text())

    for pattern, what in FORBIDDEN.items():
        assert not re.search(pattern, source, re.I), f"{path.name} has {what}: {pattern}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_scripts_have_a_nonce_and_a_source(path: Path) -> None:
    for tag, attributes in elements(path.read_text()):
        if tag == "script" and "entrance" not in path.parts:
            assert attributes.get("nonce") == "{{ nonce }}"
            assert (attributes.get("src") or "").startswith("{{ asset(")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_attributes_of_htmx_have_the_nonce_of_the_page(path: Path) -> None:
    """Others are stripped by its extension, so that injected ones send nothing."""
    for line in path.read_text().splitlines():
        if re.search(r"\shx-(get|post|put|patch|delete|headers)\b", line):
            assert 'hx-nonce="{{ nonce }}"' in line


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_each_form_that_changes_something_has_its_token(path: Path) -> None:
    source = path.read_text()

    for form in re.findall(r'<form[^>]*method="post".*?</form>', source, re.S | re.I):
        assert "forms.token()" in form or 'name="csrf"' in form or "hidden()" in form


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_build_nodes_and_never_markup(path: Path) -> None:
    source = path.read_text()

    assert not [word for word in UNSAFE_SCRIPT if word in source]
