"""Checks inputs against the contract of the vendor's model, before anything is quoted. Pure.

Only facts that are sure refuse a request (``Parameter.is_sure``). An unknown parameter is refused
if all parameters of the model are known: the vendor's queue drops it silently, and a misspelt
picture would be charged as a request without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from gateway.catalog.market.contract import SOURCES, Contract, Parameter, contract_of
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.errors import InvalidRequest
from gateway.tasks.visual import VisualTask
from gateway.voices.store import is_voice_id
from workers.contract.languages import name_of

RATIO_TOLERANCE: Final = 0.05
"""Relative tolerance: sides are multiples of a step, so few sizes are exactly 16:9."""
SHOWN_MAX: Final = 80
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})\s*[xX*]\s*([1-9][0-9]{0,4})")
_NEUTRAL: Final[Mapping[str, Any]] = {
    "n": 1,
    "speed": 1,
    "scale": 1,
    # The default output format of ElevenLabs' API, and of ours.
    "format": "mp3",
    "sample_rate": 44_100,
    "bitrate": 128_000,
}
"""Values of our fields without an effect, which clients send although they are the defaults."""
_NOT_SENT: Final = ("format", "compression", "previews", "scale")
"""Fields of images and videos that no adapter sends to an upstream."""


def check_contract(
    entry: CatalogEntry, task: Task, value: BaseModel, *, prefix: str, are_theirs: bool = False
) -> None:
    """Raise ``InvalidRequest`` if the entry's model would not accept an input.

    ``are_theirs``: the fields are the vendor's, not ours.
    """
    contract = contract_of(entry)
    if contract is None:
        return
    if are_theirs:
        given = list(_theirs(value.model_dump(exclude_unset=True), prefix))
    else:
        given = list(_ours(task, value, prefix))
    check = _Check(contract, entry.name)
    check.required(given, prefix, are_theirs=are_theirs)
    for one in given:
        check.one(one)
    check.combinations(given)


def without_unknown(entry: CatalogEntry, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without those that the entry's model is known not to have."""
    contract = contract_of(entry)
    if contract is None or not contract.is_complete:
        return dict(parameters)
    return {name: value for name, value in parameters.items() if contract.find(name)}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value of a request, and its name in the client's body."""

    name: str
    param: str
    value: Any
    is_theirs: bool


def _ours(task: Task, value: BaseModel, prefix: str) -> Iterator[_Given]:
    """Yield the values of a task's input under our names."""
    fields = {
        name: found
        for name in type(value).model_fields
        if name in value.model_fields_set and (found := getattr(value, name)) not in (None, "", [])
    }
    if isinstance(value, VisualTask):
        for name in _NOT_SENT:
            if name != "scale" or task != "video-upscale":
                fields.pop(name, None)
        if value.width is not None and value.height is not None:
            fields["size"] = f"{value.width}x{value.height}"
        for name in ("width", "height"):
            fields.pop(name, None)
    for name, found in fields.items():
        if name == "parameters":
            yield from _theirs(found, f"{prefix}parameters.")
        elif name == "voice" and is_voice_id(str(found)):
            yield _Given("recording", f"{prefix}voice", found, False)
        elif name in ("size", "quality") and found == "auto":
            continue
        elif name not in _NEUTRAL or found != _NEUTRAL[name]:
            yield _Given("images" if name == "image" else name, f"{prefix}{name}", found, False)


def _theirs(fields: Mapping[str, Any], prefix: str) -> Iterator[_Given]:
    for name, value in fields.items():
        if value is not None:
            yield _Given(name, f"{prefix}{name}", value, True)


@dataclass(frozen=True, slots=True)
class _Check:
    contract: Contract
    model: str

    def required(self, given: Sequence[_Given], prefix: str, *, are_theirs: bool) -> None:
        """Refuse an input that lacks a parameter without a default."""
        found = {parameter.name for one in given if (parameter := self.find(one))}
        for parameter in self.contract.parameters:
            if (
                not parameter.required
                or parameter.default is not None
                or not parameter.is_sure("required")
                or found & {parameter.name, parameter.unless}
            ):
                continue
            if not parameter.is_sure("name") and any(_is_source(one.value) for one in given):
                continue
            name = parameter.sent_as if are_theirs else parameter.name
            name = "image" if name == "images" and not are_theirs else name
            raise InvalidRequest(
                "missing_required_parameter",
                f"{self.model} needs {_WHAT.get(parameter.name, name)}; send {prefix}{name}.",
                param=f"{prefix}{name}",
            )

    def find(self, given: _Given) -> Parameter | None:
        """Return the parameter of a value. Among the vendor's fields, a file of ours is unknown,
        because it would not be attached."""
        found = self.contract.find(given.name)
        if found is None or not given.is_theirs or found.type not in SOURCES:
            return found
        is_known = given.name == found.sent_as or not found.is_sure("name")
        return found if is_known else None

    def one(self, given: _Given) -> None:
        parameter = self.find(given)
        if parameter is not None:
            self._value(parameter, given)
        elif given.name == "size" and (ratio := self.contract.find("aspect_ratio")) is not None:
            self._shape(ratio, given)
        elif self.contract.is_complete:
            raise self._unknown(given)

    def combinations(self, given: Sequence[_Given]) -> None:
        """Refuse values that the model does not accept together."""
        known = [(self.find(one), one) for one in given]
        by_name = {parameter.name: one for parameter, one in known if parameter is not None}
        for forbidden in self.contract.forbidden:
            if all(
                name in by_name and _same(by_name[name].value, value)
                for name, value in forbidden.items()
            ):
                together = " and ".join(f"{name} {value}" for name, value in forbidden.items())
                raise InvalidRequest(
                    "invalid_value",
                    f"{self.model} does not support {together} together.",
                    param=by_name[next(reversed(list(forbidden)))].param,
                )

    def _value(self, parameter: Parameter, given: _Given) -> None:
        value = given.value
        if parameter.type in SOURCES:
            count = len(value) if isinstance(value, list) else 1
            if parameter.max is not None and count > parameter.max and parameter.is_sure("max"):
                raise self._refuse(given, f"has {count} files", f"at most {parameter.max}")
            return
        if parameter.type == "size" and parameter.pixels is not None:
            self._size(parameter, given)
            return
        if parameter.options and parameter.is_sure("options"):
            if not _is_option(parameter, value):
                accepted = ", ".join(map(str, parameter.values or parameter.options))
                raise self._refuse(given, f"is {_shown(value)}", accepted)
            return
        if not self._has_type(parameter, value):
            if parameter.is_sure("type"):
                raise self._refuse(given, f"is {_shown(value)}", _TYPES[parameter.type])
            return
        self._range(parameter, given)

    @staticmethod
    def _has_type(parameter: Parameter, value: Any) -> bool:
        if parameter.type == "boolean":
            return isinstance(value, bool) or value in ("true", "false")
        if parameter.type in ("integer", "number"):
            number = _number(value)
            return number is not None and (parameter.type == "number" or number.is_integer())
        return isinstance(value, str)

    def _range(self, parameter: Parameter, given: _Given) -> None:
        if parameter.type == "boolean":
            return
        is_text = parameter.type not in ("integer", "number")
        size = len(given.value) if is_text else _number(given.value)
        unit = " characters" if is_text else ""
        found = f"has {size} characters" if is_text else f"is {_shown(given.value)}"
        if size is None:
            return
        if parameter.min is not None and size < parameter.min and parameter.is_sure("min"):
            raise self._refuse(given, found, f"at least {parameter.min}{unit}")
        if parameter.max is not None and size > parameter.max and parameter.is_sure("max"):
            raise self._refuse(given, found, f"at most {parameter.max}{unit}")

    def _size(self, parameter: Parameter, given: _Given) -> None:
        if given.value in parameter.options:
            return
        found = _SIZE.fullmatch(given.value) if isinstance(given.value, str) else None
        named = ", ".join(["width x height, such as 2048x2048", *map(str, parameter.options)])
        if found is None:
            raise self._refuse(given, f"is {_shown(given.value)}", named)
        width, height = int(found[1]), int(found[2])
        least, most = parameter.pixels or (0, 0)
        if parameter.is_sure("pixels") and not least <= width * height <= most:
            pixels = f"{least} to {most} pixels, such as {parameter.default}"
            raise self._refuse(given, f"is {width}x{height}", pixels)
        ratio = parameter.ratio_max
        if (
            ratio
            and parameter.is_sure("ratio_max")
            and max(width, height) > ratio * min(width, height)
        ):
            raise self._refuse(given, f"is {width}x{height}", f"sides of at most {ratio:g}:1")

    def _shape(self, ratio: Parameter, given: _Given) -> None:
        """Check a size by its aspect ratio, which is what the model reads."""
        found = _SIZE.fullmatch(str(given.value))
        if found is None or not ratio.is_sure("options"):
            return
        shape = math.log(int(found[1]) / int(found[2]))
        for option in map(str, ratio.options):
            wide, _, high = option.partition(":")
            if abs(math.log(int(wide) / int(high)) - shape) <= RATIO_TOLERANCE:
                return
        shapes = ", ".join(map(str, ratio.options))
        raise self._refuse(given, f"is {given.value}", f"the aspect ratios {shapes}")

    def _refuse(self, given: _Given, found: str, accepted: str) -> InvalidRequest:
        return InvalidRequest(
            "invalid_value",
            f"{given.name} {found}, but {self.model} accepts {accepted}.",
            param=given.param,
        )

    def _unknown(self, given: _Given) -> InvalidRequest:
        names = [one.sent_as if given.is_theirs else one.name for one in self.contract.parameters]
        nearest = self.contract.nearest(given.name[:SHOWN_MAX])
        hint = f" Did you mean {nearest}?" if nearest else ""
        accepted = f"{self.model} accepts {', '.join(names)}."
        if given.is_theirs:
            return InvalidRequest(
                "unknown_parameter",
                f"Unknown parameter: {given.name}.{hint} {accepted}",
                param=given.param,
            )
        return InvalidRequest(
            "unsupported_parameter",
            f"{given.name} is not a parameter of {self.model}.{hint} {accepted}",
            param=given.param,
        )


_WHAT: Final[Mapping[str, str]] = {
    "images": "a picture",
    "recording": "a recording of the voice",
    "video": "a video",
    "prompt": "a prompt",
    "text": "a text",
}
_TYPES: Final[Mapping[str, str]] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "size": "a text",
    "language": "a text",
}


def _is_option(parameter: Parameter, value: Any) -> bool:
    if any(_same(value, option) for option in parameter.options):
        return True
    if isinstance(value, str) and value in parameter.values:
        return True
    return parameter.type == "language" and name_of(str(value)) in parameter.options


def _same(value: Any, option: Any) -> bool:
    """Whether a value is an option; numbers can be sent as strings."""
    one, other = _number(value), _number(option)
    if one is not None and other is not None:
        return one == other
    return type(value) is type(option) and bool(value == option)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _is_source(value: Any) -> bool:
    """Whether a value can be a file, or files."""
    if isinstance(value, list):
        return any(isinstance(one, str | dict) for one in value)
    if isinstance(value, str):
        return value.startswith(("http://", "https://", "data:", "file-"))
    return isinstance(value, dict)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."
