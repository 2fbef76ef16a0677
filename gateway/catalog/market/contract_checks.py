"""Compares catalog entries with the contracts of their vendors' models. Pure.

A finding is an error if no request could use the entry as it is written, or if the worker would
send what the model does not read. Anything else, and whatever rests on a guess, is a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.catalog.market.contract import Contract, Fact, Parameter, contract_of, contracts
from gateway.catalog.problems import Level
from gateway.catalog.rules import Place
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS

Finding = tuple[Place, str, Level]

GMI_OPTIONS: Final = (
    *("images", "list", "mask", "video", "audio", "size", "language", "scale", "fields"),
    *("strings", "values", "constants", "request_id", "submit_timeout_s", "queued_timeout_s"),
    *("poll_min_s", "poll_max_s"),
)
"""Options of the dialect gmi, as the workers read them; a test compares both."""
SENT_AS: Final[Mapping[str, str]] = {"seconds": "duration"}
"""Our fields that the dialect gmi renames by default, as the workers do."""
_BOUNDS: Final[Mapping[str, Sequence[str]]] = {
    # Limits of an entry, and the parameters that they bound.
    "seconds": ("seconds",),
    "characters": ("text", "prompt"),
    "sources": ("images",),
    "steps": ("steps",),
    "guidance": ("guidance",),
    "scale": ("scale",),
    "fps": ("fps",),
}
_LISTS: Final[Mapping[str, str]] = {
    "sizes": "size",
    "qualities": "quality",
    "resolutions": "resolution",
    "voices": "voice",
    "languages": "language",
}


def contract_findings(entry: CatalogEntry) -> Iterator[Finding]:
    """Find what contradicts the contract of an entry's model, or names no contract."""
    if entry.upstream is None or entry.upstream.dialect != "gmi":
        return
    for name in entry.options:
        if name not in GMI_OPTIONS:
            message = f"unknown option {name!r}; {_nearest(name, GMI_OPTIONS)}"
            yield ("options", name), message, "error"
    contract = contract_of(entry)
    if contract is None:
        if entry.contract:
            yield from _missing(entry)
        return
    yield from _tasks(entry, contract)
    yield from _limits(entry, contract)
    yield from _listed(entry, contract)
    yield from _defaults(entry, contract)
    yield from _fields(entry, contract)
    yield from _sources(entry, contract)
    yield from _constants(entry, contract)


def _missing(entry: CatalogEntry) -> Iterator[Finding]:
    assert entry.upstream is not None
    wanted = entry.upstream.model or entry.name
    known = {name.lower(): one for one in contracts().values() for name in (one.name, one.model_id)}
    near = difflib.get_close_matches(wanted.lower(), known, n=1, cutoff=0.8)
    found = known[near[0]] if near else contracts().get(entry.name)
    if found is None:
        return
    place = ("upstream", "model") if entry.upstream.model else ("name",)
    yield (
        place,
        f"{wanted!r} has no contract, so its inputs are not checked; did you mean "
        f"{found.model_id}? If not, write `contract: false`",
        "warning",
    )


def _tasks(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    known = (contract.task, *contract.also)
    places: list[tuple[Place, str]] = [(("task",), entry.task)]
    places += [(("also", index), task) for index, task in enumerate(entry.also)]
    for place, task in places:
        if task not in known:
            yield place, f"{contract.name} does not do {task}; {_nearest(task, known)}", "error"


def _limits(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    for limit, names in _BOUNDS.items():
        value = getattr(entry.limits, limit)
        found = next((one for name in names if (one := contract.find(name))), None)
        if value is None:
            continue
        if found is None:
            if contract.is_complete and limit != "sources":
                message = f"{contract.name} has no {names[0]}, so this bounds nothing"
                yield ("limits", limit), message, "warning"
            continue
        least, most = _range(found)
        if least is not None and value < least:
            message = f"{value:g} allows nothing that {contract.name} accepts; it needs {least:g}"
            yield ("limits", limit), message, "error"
        elif most is not None and value > most:
            message = f"{value:g} is more than {contract.name} accepts ({most:g})"
            yield ("limits", limit), message, "warning"
    images = entry.limits.images
    if images is not None and images > 1 and contract.is_complete and contract.find("n") is None:
        yield ("limits", "images"), f"{contract.name} returns one image a request", "error"


def _range(parameter: Parameter) -> tuple[float | None, float | None]:
    """Return the lowest and the highest value that are sure to be its bounds."""
    numbers = [one for one in parameter.options if isinstance(one, int | float)]
    if numbers and parameter.is_sure("options"):
        return min(numbers), max(numbers)
    return (
        parameter.min if parameter.is_sure("min") else None,
        parameter.max if parameter.is_sure("max") else None,
    )


def _listed(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    """Find sizes, voices and the like that the model does not have."""
    for field, name in _LISTS.items():
        parameter = contract.find(name)
        if parameter is None or not parameter.options or parameter.pixels is not None:
            continue
        known = [str(one) for one in (*parameter.options, *parameter.values)]
        for index, value in enumerate(getattr(entry, field)):
            if value not in known and parameter.type != "language":
                place = (field, index) if field != "qualities" else (field, value)
                message = f"{value!r} is not a {name} of {contract.name}; {_nearest(value, known)}"
                yield place, message, _level(parameter, "options")


def _defaults(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    for name in sorted(entry.default_parameters.model_fields_set):
        value = getattr(entry.default_parameters, name)
        parameter = contract.find(name)
        if value is None or parameter is None:
            continue
        place = ("default_parameters", name)
        if parameter.options and value not in (*parameter.options, *parameter.values):
            accepted = ", ".join(map(str, parameter.options))
            message = f"{value!r} is not accepted by {contract.name}; accepted: {accepted}"
            yield place, message, _level(parameter, "options")
        elif isinstance(value, int | float):
            least, most = _range(parameter)
            if (least is not None and value < least) or (most is not None and value > most):
                message = f"{value:g} is not accepted by {contract.name}: {least} to {most}"
                yield place, message, "error"


def _fields(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    """Find fields that the worker would send under names that the model does not read."""
    fields = _mapping(entry.options.get("fields"))
    strings = entry.options.get("strings") or ()
    values = _mapping(entry.options.get("values"))
    known = [one.name for one in contract.parameters]
    if contract.is_complete:
        named: list[tuple[Place, str]]
        named = [(("options", "fields", name), name) for name, to in fields.items() if to]
        named += [(("options", "values", name), name) for name in values]
        named += [(("options", "strings", n), str(name)) for n, name in enumerate(strings)]
        for place, name in named:
            if contract.find(name) is None:
                message = f"{name!r} is not a parameter of {contract.name}; {_nearest(name, known)}"
                yield place, message, "error"
    for parameter in contract.parameters:
        if parameter.type in ("image", "images", "video", "audio") or parameter.name == "scale":
            continue
        ours = parameter.name
        if ours in fields and fields[ours] is None:
            continue
        sent = fields.get(ours) or SENT_AS.get(ours, ours)
        if sent != parameter.sent_as:
            message = (
                f"{ours} would be sent as {sent!r}, but {contract.name} reads it as "
                f"{parameter.sent_as!r}; write `fields: {{{ours}: {parameter.sent_as}}}`"
            )
            yield ("options", "fields", ours), message, _level(parameter, "name")
        if parameter.vendor_type == "string" and ours not in strings:
            message = f"{contract.name} takes {ours} as a string; add it to `strings`"
            yield ("options", "strings"), message, _level(parameter, "type")


def _sources(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    """Find files that the worker would send under other names than the model's."""
    makes_images = TASKS[entry.task].makes == "image"
    for name in ("images", "mask", "video", "scale"):
        parameter = contract.find(name)
        if parameter is None:
            continue
        sent = entry.options.get(name) or ("image" if name == "images" else name)
        if sent != parameter.sent_as:
            message = (
                f"{name} would be sent as {sent!r}, but {contract.name} reads "
                f"{parameter.sent_as!r}; write `{name}: {parameter.sent_as}`"
            )
            yield ("options", name), message, _level(parameter, "name")
        as_list = entry.options.get("list")
        as_list = makes_images if as_list is None else as_list
        if parameter.as_list is not None and as_list != parameter.as_list:
            message = f"{contract.name} needs `list: {str(parameter.as_list).lower()}`"
            yield ("options", "list"), message, _level(parameter, "type")


def _constants(entry: CatalogEntry, contract: Contract) -> Iterator[Finding]:
    known = [one.sent_as for one in contract.parameters]
    for name, value in _mapping(entry.options.get("constants")).items():
        parameter = next((one for one in contract.parameters if one.sent_as == name), None)
        if parameter is None:
            level: Level = "error" if contract.is_complete else "warning"
            message = f"{name!r} is not a parameter of {contract.name}; {_nearest(name, known)}"
            yield ("options", "constants", name), message, level
        elif parameter.options and str(value) not in map(
            str, (*parameter.options, *parameter.values.values())
        ):
            accepted = ", ".join(map(str, parameter.options))
            message = f"{value!r} is not accepted by {contract.name}; accepted: {accepted}"
            yield ("options", "constants", name), message, _level(parameter, "options")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _level(parameter: Parameter, fact: Fact) -> Level:
    return "error" if parameter.is_sure(fact) else "warning"


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    accepted = f"accepted: {', '.join(known)}"
    return f"did you mean {near[0]}? ({accepted})" if near else accepted
