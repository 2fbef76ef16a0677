"""What a form begins with: an example, shared settings, or the output of an earlier request. Pure.

An address names fields as the form does. It carries settings, and no contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from gateway.catalog.schema import CatalogEntry
from gateway.console.playground.origins import KINDS, PLAYGROUND, PREFIX
from gateway.console.playground.parts import Field, FormName, task_of
from gateway.console.views.formats import usd
from gateway.pricing import NANOS_PER_USD

CHEAP_NANOS: Final = NANOS_PER_USD // 1000
"""Examples cost less than this."""
EXAMPLES_MAX: Final = 3
_FILES: Final = frozenset({"image", "images", "video", "audio"})


@dataclass(frozen=True, slots=True)
class Example:
    """An example to try, with the most that it costs."""

    text: str
    path: str
    most: str


def example_values(entry: CatalogEntry, form: FormName) -> Mapping[str, str]:
    """Return the texts of an example that works, to begin with."""
    return next(_fitting(entry, form), {})


def cheap_examples(
    entry: CatalogEntry, form: FormName, quote: Callable[[Mapping[str, str]], int | None]
) -> list[Example]:
    """Return a few examples that need no file and cost next to nothing. ``quote`` returns the most
    that a form's values cost."""
    found = []
    for values in _fitting(entry, form):
        nanos = quote(values)
        text = values.get("prompt") or values.get("text") or values.get("input")
        if text and nanos is not None and nanos < CHEAP_NANOS:
            path = address(entry, form, {name: one for name, one in values.items() if one})
            found.append(Example(text, path, usd(nanos)))
    return found[:EXAMPLES_MAX]


def _fitting(entry: CatalogEntry, form: FormName) -> Iterator[Mapping[str, str]]:
    for each in entry.examples:
        if (task_of(form) == entry.task) == (not _FILES & each.keys()):
            found = {
                name: f"{value:g}" if isinstance(value, float) else str(value)
                for name, value in each.items()
                if isinstance(value, str | int | float) and name not in _FILES
            }
            yield {**found, "message": found.get("prompt", "")}


def address(entry: CatalogEntry, form: FormName, values: Mapping[str, str]) -> str:
    return f"{PLAYGROUND}?{urlencode({'model': entry.name, 'task': form, **values})}"


def shared_address(
    entry: CatalogEntry, form: FormName, fields: Sequence[Field], values: Mapping[str, str]
) -> str:
    """Return the address of a form with its settings, without contents."""
    settings = [each.name for each in fields if not each.is_content]
    return address(entry, form, {name: values[name] for name in settings if values.get(name)})


def named_values(fields: Sequence[Field], query: Mapping[str, str]) -> dict[str, str]:
    """Return the values of fields that an address names, and the outputs to go on from. A picture
    or a video fits the first file of its kind."""
    found = {each.name: query[each.name] for each in fields if each.name in query}
    for kind in KINDS:
        place = query.get(f"{PREFIX}{kind}")
        able = [each for each in fields if each.kind == "file" and each.accepts == f"{kind}/*"]
        if place and able:
            found[f"{PREFIX}{able[0].name}"] = place
    return found
