"""Contracts of market models: the parameters that each vendor's model accepts. One file a model.

No vendor publishes a schema, so every fact has its evidence. Only a fact that was seen in calls of
GMI Cloud, or that its documentation states, refuses a request. Every other fact is a guess: it is
shown, but never refuses what the vendor may accept.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, get_args

from pydantic import Field, StrictBool, StrictFloat, StrictInt, ValidationError, model_validator

from gateway.catalog.document import Document, Flaw, Place, Position, Unreadable
from gateway.catalog.problems import CatalogError, CatalogProblem
from gateway.catalog.schema import Amount, CatalogEntry, CatalogModel, Count, Name, Text
from gateway.catalog.tasks import Task
from gateway.pricing import Component, Price, Unit

FILES: Final = Path(__file__).parent

Kind: TypeAlias = Literal[
    "string",
    "integer",
    "number",
    "boolean",
    "size",
    "language",
    "image",
    "images",
    "video",
    "audio",
]
UNKNOWN_SECONDS: Final = 600.0
"""Assumed longest output of an upstream's model that states none."""
SOURCES: Final = ("image", "images", "video", "audio")
"""Kinds of parameters that are files, sent as URLs."""
Evidence: TypeAlias = Literal["calls", "docs", "vendor", "host", "guess"]
"""``calls``: public code that calls GMI Cloud; ``docs``: GMI Cloud's documentation; ``vendor``: the
vendor's own documentation; ``host``: another host of the model."""
Fact: TypeAlias = Literal[
    "name", "type", "required", "options", "min", "max", "pixels", "ratio_max", "default"
]
Value: TypeAlias = StrictBool | StrictInt | StrictFloat | str
Bound: TypeAlias = StrictInt | StrictFloat


class Parameter(CatalogModel):
    """A parameter under our name, or under the vendor's if our API has no field for it."""

    name: Name
    vendor_name: Name | None = None
    """The vendor's name, if it differs."""
    type: Kind
    vendor_type: Literal["string"] | None = None
    """``string`` for a number that the vendor's model takes in quotes."""
    as_list: StrictBool | None = None
    """For images: whether a single one is sent as a list, too."""
    required: StrictBool = False
    unless: Name | None = None
    """Parameter that replaces a required one."""
    options: tuple[Value, ...] = ()
    values: Mapping[str, str] = {}
    """The vendor's values by ours, if they differ."""
    min: Bound | None = None
    """Minimum: of a number its value, of a text its characters, of sources their count."""
    max: Bound | None = None
    pixels: tuple[StrictInt, StrictInt] | None = None
    """Minimum and maximum area of a size."""
    ratio_max: Bound | None = None
    """Maximum ratio between the sides of a size."""
    default: Value | None = None
    """Value that is used if the parameter is omitted."""
    evidence: Annotated[tuple[Evidence, ...], Field(min_length=1)]
    guesses: tuple[Fact, ...] = ()
    """Facts of the parameter that this evidence does not cover."""
    description: Text | None = None

    @property
    def sent_as(self) -> str:
        return self.vendor_name or self.name

    def is_sure(self, fact: Fact) -> bool:
        """Whether a request that contradicts the fact is refused."""
        known = "calls" in self.evidence or "docs" in self.evidence
        return known and "guess" not in self.evidence and fact not in self.guesses

    def guessed(self) -> list[str]:
        """Return the facts that the parameter has, but that refuse no request."""
        return [
            fact
            for fact in get_args(Fact)
            if (fact == "name" or getattr(self, fact) not in (None, (), False))
            and not self.is_sure(fact)
        ]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for fact in self.guesses:
            if fact != "name" and getattr(self, fact) in (None, ()):
                raise ValueError(f"guesses names {fact!r}, which {self.name!r} does not have")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        is_open = not self.options or self.type == "size"
        if self.default is not None and self.default not in self.options and not is_open:
            raise ValueError(f"the default {self.default!r} is not one of its options")
        if self.as_list is not None and self.type != "images":
            raise ValueError("only images have as_list")
        return self


class Expected(CatalogModel):
    """Usual duration of a request, in seconds."""

    least: StrictInt
    most: StrictInt
    evidence: Annotated[tuple[Evidence, ...], Field(min_length=1)]


class PresumedCost(CatalogModel):
    """What the vendor, or another host, charges for the model; GMI Cloud's price may differ."""

    unit: Unit
    amount: Amount
    per: Count = 1
    evidence: Annotated[tuple[Evidence, ...], Field(min_length=1)]

    @property
    def price(self) -> Price:
        return Price((Component(self.unit, self.amount, self.per),))


class Contract(CatalogModel):
    """What one of the vendors' models accepts."""

    name: Name
    vendor_id: Name | None = None
    """The model's id in the vendor's queue, if it differs from ``name``."""
    task: Task
    also: tuple[Task, ...] = ()
    price: Amount
    presumed_cost: PresumedCost | None = None
    is_complete: StrictBool
    """Whether every parameter is known; if so, others are refused."""
    expected_seconds: Expected
    strengths: Annotated[tuple[Text, ...], Field(min_length=1)]
    notes: tuple[Text, ...] = ()
    parameters: Annotated[tuple[Parameter, ...], Field(min_length=1)]
    forbidden: tuple[Mapping[Name, Value], ...] = ()
    """Combinations of values that the model does not accept."""
    example: dict[str, Any]
    """An input of ``POST /v1/requests``."""

    @property
    def model_id(self) -> str:
        return self.vendor_id or self.name

    def find(self, name: str) -> Parameter | None:
        """Return a parameter by our name or by the vendor's."""
        for parameter in self.parameters:
            if name in (parameter.name, parameter.sent_as):
                return parameter
        return None

    def nearest(self, name: str) -> str | None:
        """Return the known name that resembles an unknown one."""
        known = [name for one in self.parameters for name in (one.sent_as, one.name)]
        return next(iter(difflib.get_close_matches(name, known, n=1)), None)

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [parameter.name for parameter in self.parameters]
        for names_of in (names, [parameter.sent_as for parameter in self.parameters]):
            if repeated := {name for name in names_of if names_of.count(name) > 1}:
                raise ValueError(f"the parameter {min(repeated)!r} is listed twice")
        for combination in self.forbidden:
            if unknown := combination.keys() - set(names):
                raise ValueError(f"forbidden names the unknown parameter {min(unknown)!r}")
        for parameter in self.parameters:
            if parameter.unless is not None and parameter.unless not in names:
                raise ValueError(f"unless names the unknown parameter {parameter.unless!r}")
        return self


def contract_of(entry: CatalogEntry) -> Contract | None:
    """Return the contract of an entry's model, or None if there is none."""
    upstream = entry.upstream
    if upstream is None or upstream.dialect != "gmi" or not entry.contract:
        return None
    return _by_id().get(upstream.model or entry.name)


def longest_seconds(entry: CatalogEntry) -> float:
    """Return the longest video or audio that a request to an entry can produce.

    Of an upstream whose price does not depend on it, this bounds only what is measured.
    """
    if entry.limits.seconds is not None or entry.upstream is None:
        return entry.limits.seconds or 0
    contract = contract_of(entry)
    parameter = None if contract is None else contract.find("seconds")
    numbers = [
        one for one in (parameter.options if parameter else ()) if isinstance(one, int | float)
    ]
    return max(numbers, default=UNKNOWN_SECONDS)


def load_contract(path: Path) -> Contract:
    """Read and check a contract file. Raise ``CatalogError`` with the place of each problem."""
    try:
        document = Document(path.read_text(encoding="utf-8"))
    except Unreadable as error:
        raise CatalogError([_problem(path, error.flaw)]) from None
    problems = [_problem(path, flaw) for flaw in document.repeated_keys]
    try:
        contract = Contract.model_validate(document.value)
    except ValidationError as error:
        problems += [
            _problem(path, Flaw(document.position(place), message), place)
            for place, message in _complaints(error)
        ]
        raise CatalogError(problems) from None
    if contract.name != path.stem:
        message = f"the file of {contract.name!r} must be called {contract.name}.yaml"
        problems.append(_problem(path, Flaw(document.position(("name",)), message), ("name",)))
    if problems:
        raise CatalogError(problems)
    return contract


@cache
def contracts() -> Mapping[str, Contract]:
    """Return the shipped contracts by name. Raise ``CatalogError``."""
    found = [load_contract(path) for path in sorted(FILES.glob("*.yaml"))]
    return {contract.name: contract for contract in found}


@cache
def _by_id() -> Mapping[str, Contract]:
    found = {contract.model_id: contract for contract in contracts().values()}
    return {**found, **contracts()}


def _complaints(error: ValidationError) -> Iterator[tuple[Place, str]]:
    for found in error.errors(include_url=False):
        # Alternatives of a union add the name of the alternative, which is no place in the file.
        place: Place = tuple(part for part in found["loc"] if part != "[key]")
        message = found["msg"].removeprefix("Value error, ")
        yield place, message if found["type"] == "value_error" else f"{place[-1]}: {message}"


def _problem(path: Path, flaw: Flaw, place: Place = ()) -> CatalogProblem:
    position: Position = flaw.position
    dotted = ".".join(map(str, place))
    return CatalogProblem(str(path), position.line, position.column, dotted, flaw.message)
