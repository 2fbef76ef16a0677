"""Reads the pages of the documentation: their links, their blocks of code, their tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEREDOC: Final = re.compile(r"<<'(\w+)'")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    language: str
    text: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [Block(page, match[1], match[2]) for match in _FENCE.finditer(page.read_text())]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page: lines after ``$ `` with the lines that continue them.

    A command continues after a backslash, inside a quote or a parenthesis (indented lines), and
    until the end of its heredoc.
    """
    for block in blocks(page, "console"):
        command: list[str] = []
        until = ""
        for line in block.text.splitlines():
            if until:
                command.append(line)
                until = "" if line == until else until
            elif line.startswith("$ "):
                if command:
                    yield "\n".join(command)
                command = [line[2:]]
                if heredoc := _HEREDOC.search(line):
                    until = heredoc[1]
            elif command and line.startswith("  "):
                command.append(line)
            elif command:  # output
                yield "\n".join(command)
                command = []
        if command:
            yield "\n".join(command)


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of all tables under a heading, without headers and rules."""
    level = heading.split(" ")[0]
    _, _, text = prose(page).partition(f"\n{heading}\n")
    text = re.split(rf"^{level} ", text, maxsplit=1, flags=re.MULTILINE)[0]
    rows: list[list[str]] = []
    for line in text.splitlines():
        if re.fullmatch(r"[|: -]+", line):
            rows.pop()  # the header, which stands above its rule
        elif line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
