"""What may stand in ``catalog.yaml``: every field and its type.

Strict on purpose: an unknown field, a number where a text belongs, or fields that do not fit
together (``rules``) are errors before anything is sold. A superset of what a worker reads of the
same file (``workers/contract/models.py``).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from gateway.catalog import rules
from gateway.catalog.tasks import Task
from gateway.catalog.workflow import Workflow
from gateway.pricing import Component, Price, Unit, parse_usd

Engine: TypeAlias = Literal[
    "llm", "embedding", "diffusion", "upscale", "speech", "music", "talking", "echo"
]
Dialect: TypeAlias = Literal["openai", "gmi"]
CONDITIONS: Final = ("size", "quality", "resolution")
"""Attributes of what is made that a price may depend on."""

_AMOUNT: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def _amount(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is not in quotes; write a decimal string, such as "0.035"')
    if not _AMOUNT.fullmatch(value):
        raise ValueError(
            f'{value!r} is no amount; write USD as digits with at most 9 decimals, such as "0.035" '
            "(`per` makes finer prices)"
        )
    nanos = parse_usd(value)
    if nanos == 0:
        raise ValueError(f"{value!r} is nothing; whatever runs has a price, free use is a grant")
    return nanos


_DISCOUNT: Final = re.compile(r"0\.[0-9]{1,4}")


def _discount(value: Any) -> str:
    if not isinstance(value, str) or not _DISCOUNT.fullmatch(value) or not value.strip("0."):
        raise ValueError(
            f"{value!r} is no discount; write the part of the price that is taken off, in quotes, "
            'between 0 and 1 and with at most 4 decimals, such as "0.5"'
        )
    return value.rstrip("0")


Discount: TypeAlias = Annotated[str, BeforeValidator(_discount)]
"""The part of a price that is taken off: a decimal string without trailing zeros."""
Amount: TypeAlias = Annotated[int, BeforeValidator(_amount)]
"""USD as a decimal string in YAML; nano-dollars here."""
Count: TypeAlias = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]
SECONDS_MAX: Final = 86_400
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Less than the millisecond in which seconds are measured would be a limit of nothing.
Seconds: TypeAlias = Annotated[Number, Field(ge=0.001, le=SECONDS_MAX)]
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Name: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
]
Tag: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=40)]
Size: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
"""Width and height in pixels, such as ``1024x768``."""
Steps: TypeAlias = Annotated[StrictInt, Field(ge=1, le=1000)]
SIDE_MAX: Final = 16_384
SCALE_MAX: Final = 8
FPS_MAX: Final = 120
GUIDANCE_MAX: Final = 100.0
SOURCES_MAX: Final = 16


def _condition(name: str) -> str:
    if name not in CONDITIONS:
        raise ValueError(f"{name!r} is no condition; accepted: {', '.join(CONDITIONS)}")
    return name


class CatalogModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PriceLine(CatalogModel):
    """An amount for every ``per`` units, where what is made matches ``when``."""

    unit: Unit
    amount: Amount
    per: Count = 1
    when: dict[Annotated[str, AfterValidator(_condition)], Text] = {}


class Limits(CatalogModel):
    """Bounds on one request; what a hold covers follows from them."""

    context_tokens: Count | None = None
    """Of prompt and answer together."""
    output_tokens: Count | None = None
    """Of each choice."""
    choices: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    template_tokens: Count | None = None
    """What the chat template adds to a prompt once, where that is more than most templates do."""
    inputs: Annotated[StrictInt, Field(ge=1, le=2048)] | None = None
    """Texts in one request for embeddings."""
    dimensions: Annotated[StrictInt, Field(ge=1, le=65_536)] | None = None
    """Of an embedding; its bytes bound how many fit into one answer."""
    images: Annotated[StrictInt, Field(ge=1, le=100)] | None = None
    """Made by one request (``n``); 1 where it is not said."""
    sources: Annotated[StrictInt, Field(ge=1, le=SOURCES_MAX)] | None = None
    """Pictures that may be sent along; by default 1 of a model that runs here, 2 of a blend."""
    side: Annotated[StrictInt, Field(ge=1, le=SIDE_MAX)] | None = None
    """Of what is drawn, in pixels: the longer one."""
    side_step: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Both sides are multiples of this."""
    pixels: Count | None = None
    scale: Annotated[StrictInt, Field(ge=1, le=SCALE_MAX)] | None = None
    """How many times larger than drawn it can be had; where nothing is said, 1 of a model that
    draws here, and as far as an upscaler goes."""
    seconds: Seconds | None = None
    """Of video or audio made."""
    fps: Annotated[StrictInt, Field(ge=1, le=FPS_MAX)] | None = None
    characters: Count | None = None
    steps: Steps | None = None
    """Of each output."""
    guidance: Annotated[Number, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    gpu_seconds: Seconds | None = None
    timeout_s: Seconds | None = None


class Quality(CatalogModel):
    """What a named quality means, where a request does not say it itself."""

    steps: Steps | None = None
    guidance: Annotated[Number, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    scheduler: Tag | None = None


class DefaultParameters(CatalogModel):
    """What a model takes for a parameter that a request leaves out: first of a model of text, then
    of one that draws."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=1000)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None

    quality: Tag | None = None
    steps: Steps | None = None
    guidance: Annotated[Number, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    strength: Annotated[Number, Field(ge=0, le=1)] | None = None
    scheduler: Tag | None = None
    seconds: Seconds | None = None
    fps: Annotated[StrictInt, Field(ge=1, le=FPS_MAX)] | None = None


class Slo(CatalogModel):
    """How fast a model promises to be; a request that keeps every bound counts as goodput."""

    ttft_ms: Count | None = None
    """To the first token."""
    tpot_ms: Count | None = None
    """From one token to the next, in the mean."""
    first_audio_ms: Count | None = None
    """To the first sound of what speaks or plays."""
    total_ms: Count | None = None


# No user or password in the address: a credential stands in the environment only.
Url: TypeAlias = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Endpoint(CatalogModel):
    """One of several places where a model is served; what it leaves out is the upstream's."""

    url: Url
    model: Text | None = None
    credential: Variable | None = None
    tier: Annotated[StrictInt, Field(ge=0, le=9)] = 0
    """Those of a higher number are asked only when none of the lower takes work."""
    concurrency: Annotated[StrictInt, Field(ge=1, le=10_000)] | None = None


class Upstream(CatalogModel):
    """A model that somebody else serves over HTTP; ``credential`` names a worker's variable."""

    url: Url | None = None
    endpoints: Annotated[tuple[Endpoint, ...], Field(max_length=64)] = ()
    dialect: Dialect = "openai"
    model: Text | None = None
    credential: Variable | None = None
    connect_timeout_s: Seconds = 5.0
    first_byte_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 60.0
    concurrency: Annotated[StrictInt, Field(ge=1, le=10_000)] = 64


def _price(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    return () if value in (rules.BY_STEPS, ()) else read(value)


class Pricing(CatalogModel):
    """What something is sold at; without a line of its own, a workflow at what its steps cost."""

    price: Annotated[tuple[PriceLine, ...], Field(min_length=1), WrapValidator(_price)]
    minimum: Amount | None = None
    """The least that a charged request costs."""

    @property
    def selling_price(self) -> Price:
        return Price(
            tuple(Component(line.unit, line.amount, line.per, line.when) for line in self.price),
            self.minimum or 0,
        )


class CatalogEntry(Pricing):
    """One model on sale."""

    name: Name
    task: Task
    also: tuple[Task, ...] = ()
    """Further tasks of the same model at the same price."""
    aliases: tuple[Name, ...] = ()
    """Names of other models, such as retired ones, at which it answers too; never without saying
    so."""
    engine: Engine | None = None
    checkpoint: Text | None = None
    options: dict[str, Any] = {}
    """The engine's or the dialect's own; the worker checks them."""
    upstream: Upstream | None = None
    workflow: Workflow | None = None
    """A chain of other models of the catalog, in the place of a route."""
    limits: Limits = Limits()
    batch: StrictBool = True
    """Whether it is sold in batches."""
    batch_discount: Discount = "0.5"
    """What a batch takes off its price."""
    default_parameters: DefaultParameters = DefaultParameters()
    slo: Slo | None = None

    family: Text | None = None
    description: Annotated[str, StringConstraints(max_length=1000)] = ""
    license: Text | None = None
    vendor: Text | None = None
    sizes: tuple[Size, ...] = ()
    """All that can be had; the first is made where none is asked for."""
    qualities: Annotated[dict[Tag, Quality], Field(max_length=16)] = {}
    schedulers: tuple[Tag, ...] = ()
    resolutions: tuple[Tag, ...] = ()
    voices: tuple[Tag, ...] = ()
    languages: tuple[Tag, ...] = ()
    good_for: tuple[Tag, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := tuple(rules.conflicts(self)):
            raise rules.Conflicts(found)
        return self

    @property
    def known_voices(self) -> tuple[str, ...]:
        """All that can be had: as listed, or as the engine's own options name them."""
        return self.voices or tuple(map(str, self.options.get("voices") or ()))

    @property
    def known_languages(self) -> tuple[str, ...]:
        return self.languages or tuple(map(str, self.options.get("languages") or ()))

    @property
    def discount(self) -> str | None:
        """What is taken off in a batch; None if it is not sold in batches."""
        return self.batch_discount if self.batch and self.workflow is None else None

    def at(self, price: Price) -> CatalogEntry:
        """The same entry as it is sold at a price that is not, or not yet, the file's."""
        if price == self.selling_price:
            return self
        lines = tuple(
            PriceLine.model_construct(
                unit=part.unit, amount=part.amount_nanos, per=part.per, when=dict(part.when)
            )
            for part in price.components
        )
        return self.model_copy(update={"price": lines, "minimum": price.minimum_nanos or None})


class Catalog(CatalogModel):
    """The whole file."""

    version: Literal[1] = 1
    models: Annotated[tuple[CatalogEntry, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if found := tuple(rules.repeated_names(self.models)) + tuple(rules.misfits(self.models)):
            raise rules.Conflicts(found)
        return self
