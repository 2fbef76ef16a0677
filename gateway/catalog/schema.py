"""What may stand in ``catalog.yaml``: every field, its type, and what must fit together.

Strict on purpose: an unknown field, a price that does not cover what the task measures, or a route
that leads nowhere is an error before anything is sold.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from gateway.pricing import Component, Price, Unit, parse_usd

Task: TypeAlias = Literal[
    "text-generation",
    "text-to-image",
    "image-to-image",
    "image-edit",
    "image-relight",
    "image-restyle",
    "image-blend",
    "text-to-video",
    "image-to-video",
    "video-upscale",
    "talking-head",
    "text-to-speech",
    "voice-clone",
    "text-to-music",
]
Engine: TypeAlias = Literal["llm", "echo"]
Dialect: TypeAlias = Literal["openai", "gmi"]

IMAGE_TASKS: Final = frozenset(
    {
        "text-to-image",
        "image-to-image",
        "image-edit",
        "image-relight",
        "image-restyle",
        "image-blend",
    }
)
VIDEO_TASKS: Final = frozenset({"text-to-video", "image-to-video", "video-upscale", "talking-head"})
AUDIO_TASKS: Final = frozenset({"text-to-speech", "voice-clone", "text-to-music"})

Name: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
]
Tag: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=40)]


def _amount(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(
            f'write the amount as a quoted decimal string, such as "0.035" (got {value!r})'
        )
    nanos = parse_usd(value)
    if nanos <= 0:
        raise ValueError(f"{value!r} is not positive; nothing is sold for nothing")
    return nanos


Amount: TypeAlias = Annotated[int, BeforeValidator(_amount)]
"""USD as a decimal string in YAML; nano-dollars here."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PriceLine(Strict):
    """An amount for every ``per`` units, where what is made matches ``when``."""

    unit: Unit
    amount: Amount
    per: Annotated[int, Field(ge=1, le=1_000_000_000)] = 1
    when: dict[Annotated[str, StringConstraints(pattern="^(size|quality|resolution)$")], str] = {}


class Limits(Strict):
    """Bounds on one request; what a hold covers follows from them."""

    context_tokens: Annotated[int, Field(ge=1)] | None = None
    output_tokens: Annotated[int, Field(ge=1)] | None = None
    choices: Annotated[int, Field(ge=1, le=128)] | None = None
    images: Annotated[int, Field(ge=1, le=100)] | None = None
    seconds: Annotated[float, Field(gt=0, le=36_000)] | None = None
    characters: Annotated[int, Field(ge=1)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class Upstream(Strict):
    """A model that somebody else serves over HTTP; ``credential`` names a worker's variable."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")]
    dialect: Dialect = "openai"
    model: str | None = None
    credential: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")] | None = None
    connect_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    first_byte_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    idle_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64


class Entry(Strict):
    """One model on sale."""

    name: Name
    task: Task
    also: tuple[Task, ...] = ()
    """Further tasks of the same model at the same price."""
    engine: Engine | None = None
    checkpoint: str | None = None
    options: dict[str, Any] = {}
    upstream: Upstream | None = None
    limits: Limits = Limits()
    default_parameters: dict[str, float | int | str] = {}
    """Taken where a request does not say; only what a request may say."""
    price: Annotated[tuple[PriceLine, ...], Field(min_length=1)]
    minimum: Amount | None = None
    """The least that a charged request costs."""

    family: str | None = None
    description: str = ""
    license: str | None = None
    vendor: str | None = None
    resolutions: tuple[str, ...] = ()
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    good_for: tuple[Tag, ...] = ()

    @field_validator("price")
    @classmethod
    def _distinct(cls, lines: tuple[PriceLine, ...]) -> tuple[PriceLine, ...]:
        seen = set()
        for line in lines:
            place = (line.unit, tuple(sorted(line.when.items())))
            if place in seen:
                raise ValueError(f"two prices for {line.unit} under the same conditions")
            seen.add(place)
        return lines

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.engine is None) == (self.upstream is None):
            raise ValueError("give exactly one of `engine` and `upstream`: a route needs one end")
        if self.engine == "llm" and self.checkpoint is None:
            raise ValueError("the engine llm needs a `checkpoint` directory")
        if self.task == "text-generation" and self.limits.output_tokens is None:
            raise ValueError("text-generation needs limits.output_tokens: a hold must have a bound")
        self._price_covers_task()
        return self

    def _price_covers_task(self) -> None:
        """Refuse a price that leaves a measured quantity unpaid, or that counts another task's."""
        units = {line.unit for line in self.price}
        whole = {line.unit for line in self.price if not line.when}
        for task in (self.task, *self.also):
            countable = {"request", *measured_units(task)}
            if wrong := units - countable:
                raise ValueError(
                    f"a price per {min(wrong)} does not fit {task}; what counts there is "
                    f"{', '.join(sorted(countable))}"
                )
            if "request" in whole:
                continue
            missing = [unit for unit in needed_units(task) if unit not in units]
            if missing:
                raise ValueError(
                    f"{task} uses {missing[0]}s, which this price does not cover; price them, or "
                    "the request"
                )

    @property
    def selling_price(self) -> Price:
        return Price(
            tuple(Component(line.unit, line.amount, line.per, line.when) for line in self.price),
            self.minimum or 0,
        )


def measured_units(task: Task) -> frozenset[Unit]:
    """The units that running a task measures, besides the request itself."""
    if task == "text-generation":
        return frozenset({"input_token", "cached_input_token", "output_token"})
    if task in IMAGE_TASKS:
        return frozenset({"image"})
    if task in VIDEO_TASKS:
        return frozenset({"video_second"})
    return frozenset({"audio_second", "character"})


def needed_units(task: Task) -> tuple[Unit, ...]:
    """The units that a price must cover unless it prices the request."""
    if task == "text-generation":
        return ("input_token", "output_token")
    if task in IMAGE_TASKS:
        return ("image",)
    if task in VIDEO_TASKS:
        return ("video_second",)
    return ()


class Catalog(Strict):
    """The whole file."""

    version: Literal[1] = 1
    models: Annotated[tuple[Entry, ...], Field(min_length=1)]
