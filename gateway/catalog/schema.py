"""The schema of ``catalog.yaml``: every field and its type.

Strict on purpose: unknown fields, values of the wrong type and fields that conflict (``rules``) are
errors before anything is sold. A superset of what a worker reads from the same file
(``workers/contract/models.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
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

from gateway.catalog import names, rules
from gateway.catalog.tasks import Task
from gateway.catalog.workflow import Workflow
from gateway.checks.strict import StrictModel
from gateway.ledger.expenses import ExpenseRates
from gateway.pricing import Component, Price, Unit, parse_usd

Engine: TypeAlias = Literal[
    "llm",
    "embedding",
    "rerank",
    "transcription",
    "diffusion",
    "upscale",
    "speech",
    "music",
    "talking",
    "echo",
]
Dialect: TypeAlias = Literal["openai", "gmi"]
CONDITIONS: Final = ("size", "quality", "resolution", "control", "reference")
"""Attributes of an output that a price may depend on."""

_AMOUNT: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def _amount(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is not in quotes; write a decimal string, such as "0.035"')
    if not _AMOUNT.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a valid amount; write USD with at most 9 decimals, such as "
            '"0.035" (for finer prices, use `per`)'
        )
    nanos = parse_usd(value)
    if nanos == 0:
        raise ValueError(
            f"{value!r} is zero, but every price component must be positive; to give usage away, "
            "grant credit"
        )
    return nanos


_DISCOUNT: Final = re.compile(r"0\.[0-9]{1,4}")


def _discount(value: Any) -> str:
    if not isinstance(value, str) or not _DISCOUNT.fullmatch(value) or not value.strip("0."):
        raise ValueError(
            f"{value!r} is not a valid discount; write the fraction of the price to take off, in "
            'quotes, between 0 and 1 with at most 4 decimals, such as "0.5"'
        )
    return value.rstrip("0")


Discount: TypeAlias = Annotated[str, BeforeValidator(_discount)]
"""Fraction of a price that is taken off: a decimal string without trailing zeros."""
Amount: TypeAlias = Annotated[int, BeforeValidator(_amount)]
"""Nano-dollars; in YAML, USD as a decimal string."""
Count: TypeAlias = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]
SECONDS_MAX: Final = 86_400
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Durations are measured in milliseconds, so a smaller limit would be zero.
Seconds: TypeAlias = Annotated[Number, Field(ge=0.001, le=SECONDS_MAX)]
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Name: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
]
Tag: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=40)]
Size: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]
"""Width and height in pixels, such as ``1024x768``."""
Percent: TypeAlias = Annotated[Number, Field(gt=0, le=100)]
Steps: TypeAlias = Annotated[StrictInt, Field(ge=1, le=1000)]
Tier: TypeAlias = Literal["demo", "entry", "middle", "top"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
"""The tiers, lowest first. ``demo``: a model that shows how something works, not how well."""
SIDE_MAX: Final = 16_384
SCALE_MAX: Final = 8
FPS_MAX: Final = 120
GUIDANCE_MAX: Final = 100.0
SOURCES_MAX: Final = 16


def _condition(name: str) -> str:
    if name not in CONDITIONS:
        raise ValueError(f"{name!r} is not a valid condition; accepted: {', '.join(CONDITIONS)}")
    return name


class CatalogModel(StrictModel):
    model_config = ConfigDict(frozen=True)


class PriceLine(CatalogModel):
    """An amount for every ``per`` units, if the output matches ``when``."""

    unit: Unit
    amount: Amount
    per: Count = 1
    when: dict[Annotated[str, AfterValidator(_condition)], Text] = {}


def price_of(lines: Iterable[PriceLine], minimum_nanos: int = 0) -> Price:
    """Return the price that some lines make up."""
    return Price(
        tuple(Component(line.unit, line.amount, line.per, line.when) for line in lines),
        minimum_nanos,
    )


class Limits(CatalogModel):
    """Limits of one request; they determine what a hold covers."""

    context_tokens: Count | None = None
    """Maximum tokens of prompt and answer together."""
    output_tokens: Count | None = None
    """Maximum tokens of each choice."""
    choices: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    template_tokens: Count | None = None
    """Tokens that the chat template adds to a prompt once, if more than most templates add."""
    inputs: Annotated[StrictInt, Field(ge=1, le=2048)] | None = None
    """Maximum number of texts in one request for embeddings, or of documents to rerank."""
    dimensions: Annotated[StrictInt, Field(ge=1, le=65_536)] | None = None
    """Dimensions of an embedding; its size limits the number of texts in one answer."""
    images: Annotated[StrictInt, Field(ge=1, le=100)] | None = None
    """Maximum number of images of one request (``n``). Default: 1."""
    sources: Annotated[StrictInt, Field(ge=1, le=SOURCES_MAX)] | None = None
    """Maximum number of attached images. Default for a model that runs here: 1, or 2 to blend; for
    a conversation: 16."""
    source_tokens: Count | None = None
    """Maximum tokens that an image adds to a prompt."""
    side: Annotated[StrictInt, Field(ge=1, le=SIDE_MAX)] | None = None
    """Maximum length of the longer side of an output, in pixels."""
    side_step: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Number of which both sides must be multiples, in pixels."""
    pixels: Count | None = None
    scale: Annotated[StrictInt, Field(ge=1, le=SCALE_MAX)] | None = None
    """Maximum upscaling factor. Default: 1 for a generator that runs here; for an upscaler,
    whatever its engine supports."""
    seconds: Seconds | None = None
    """Maximum duration of a video or audio output, or of a recording that is transcribed."""
    fps: Annotated[StrictInt, Field(ge=1, le=FPS_MAX)] | None = None
    characters: Count | None = None
    steps: Steps | None = None
    """Maximum denoising steps of each output."""
    guidance: Annotated[Number, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    gpu_seconds: Seconds | None = None
    timeout_s: Seconds | None = None


class Quality(CatalogModel):
    """Parameters that a named quality sets, unless the request sets them."""

    steps: Steps | None = None
    guidance: Annotated[Number, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    scheduler: Tag | None = None


class DefaultParameters(CatalogModel):
    """Defaults of parameters that a request omits: first for text models, then for image, video and
    music models."""

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


class AdapterRange(NamedTuple):
    """Default and maximum scale of a LoRA adapter."""

    scale: float
    scale_max: float


class StrengthRange(NamedTuple):
    """Default and maximum strength of a picture that guides an image."""

    strength: float
    strength_max: float


class Slo(CatalogModel):
    """Speed that a model promises; a request that meets every bound counts as goodput."""

    ttft_ms: Count | None = None
    """Time to first token (TTFT)."""
    tpot_ms: Count | None = None
    """Mean time per output token (TPOT)."""
    first_audio_ms: Count | None = None
    """Time to first audio (TTFA), for speech and music."""
    total_ms: Count | None = None


class Vocabulary(CatalogModel):
    """The words that a model understands, or the characters; it ignores all others."""

    file: Text | None = None
    """Tokenizer file of whole words, relative to the checkpoint; ``load_catalog`` reads it."""
    words: Annotated[tuple[Text, ...], Field(max_length=10_000)] = ()
    """Further words than those of the file, if there is one. Empty without a file: prompts are
    ignored, and never refused."""
    characters: Annotated[str, StringConstraints(min_length=1, max_length=10_000)] | None = None
    """Letters, digits and signs that a model of speech pronounces, with their variants."""

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        has_words = not self.model_fields_set.isdisjoint(("file", "words"))
        if (self.characters is None) != has_words:
            raise ValueError("give `file`, a tokenizer file, `words` or both; or `characters`")
        return self


# Without user or password: credentials are set in the environment only.
Url: TypeAlias = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Endpoint(CatalogModel):
    """One of several servers of a model; omitted fields default to those of the upstream."""

    url: Url
    model: Text | None = None
    credential: Variable | None = None
    tier: Annotated[StrictInt, Field(ge=0, le=9)] = 0
    """Endpoints of a higher tier are used only if none of a lower tier accepts work."""
    concurrency: Annotated[StrictInt, Field(ge=1, le=10_000)] | None = None
    weight: Annotated[StrictInt, Field(ge=1, le=10_000)] | None = None
    """Share of the calls among the endpoints of its tier. Default: the least busy one is called."""


class Upstream(CatalogModel):
    """A model served by another system over HTTP.

    ``credential`` is the name of an environment variable of the worker.
    """

    url: Url | None = None
    command: Annotated[str, StringConstraints(min_length=1, max_length=4000)] | None = None
    """Command by which the worker itself starts the service, on ``{port}``."""
    ready: Annotated[str, StringConstraints(pattern=r"^/[!-~]*$", max_length=200)] = "/health"
    ready_timeout_s: Seconds = 1800.0
    gpus: Annotated[StrictInt, Field(ge=0, le=64)] = 0
    environment: Annotated[dict[Variable, str], Field(max_length=64)] = {}
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
    """A price. For a workflow without price lines, the price is the sum of its steps."""

    price: Annotated[tuple[PriceLine, ...], Field(min_length=1), WrapValidator(_price)]
    minimum: Amount | None = None
    """Minimum cost of a charged request."""

    @property
    def selling_price(self) -> Price:
        return price_of(self.price, self.minimum or 0)


class CatalogEntry(Pricing):
    """One model on sale."""

    name: Name
    task: Task
    also: tuple[Task, ...] = ()
    """Further tasks of the same model at the same price."""
    aliases: tuple[Name, ...] = ()
    """Names of other models, such as retired ones, that this model serves too; answers say so."""
    input: tuple[Literal["text", "image"], ...] = ()
    """What the conversations of a text model can contain. Default: text."""
    engine: Engine | None = None
    checkpoint: Text | None = None
    options: dict[str, Any] = {}
    """Options of the engine or the dialect; the worker checks them."""
    upstream: Upstream | None = None
    workflow: Workflow | None = None
    """A chain of other models of the catalog, instead of an engine or an upstream."""
    canary: Annotated[dict[Name, Percent], Field(max_length=8)] = {}
    """Other entries that run a share of its requests, in percent, at its own price."""
    limits: Limits = Limits()
    contract: StrictBool = True
    """Whether requests are checked against the contract of the vendor's model, if it is known."""
    batch: StrictBool = True
    """Whether the model is sold in batches."""
    batch_discount: Discount = "0.5"
    """Discount on the price in batches."""
    default_parameters: DefaultParameters = DefaultParameters()
    slo: Slo | None = None
    cost: tuple[PriceLine, ...] = ()
    """What the upstream charges the operator; customers never see it."""

    family: Text | None = None
    description: Annotated[str, StringConstraints(max_length=1000)] = ""
    license: Text | None = None
    vendor: Text | None = None
    sizes: tuple[Size, ...] = ()
    """Supported sizes; the first is the default."""
    qualities: Annotated[dict[Tag, Quality], Field(max_length=16)] = {}
    schedulers: tuple[Tag, ...] = ()
    resolutions: tuple[Tag, ...] = ()
    voices: tuple[Tag, ...] = ()
    languages: tuple[Tag, ...] = ()
    good_for: tuple[Tag, ...] = ()
    tier: Tier | None = None
    roles: tuple[Tag, ...] = ()
    """Roles of the people for whom the model is a good pick, such as ``student``."""
    why: Text | None = None
    """The reason to pick the model, in one sentence."""
    strengths: tuple[Text, ...] = ()
    """Default: those of the model's contract."""
    vocabulary: Vocabulary | None = None
    """None if any text is understood."""
    examples: tuple[dict[str, Any], ...] = ()
    """Inputs of ``POST /v1/requests``. Default: the example of the model's contract."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := tuple(rules.conflicts(self)):
            raise rules.Conflicts(found)
        return self

    @property
    def buying_price(self) -> Price | None:
        """What the upstream charges, or None if that is not stated."""
        return price_of(self.cost) if self.cost else None

    @property
    def known_adapters(self) -> Mapping[str, AdapterRange]:
        """LoRA adapters by name, from the engine's options, which the engine itself validates."""
        listed = self.options.get("adapters")
        if not isinstance(listed, dict):
            return {}
        return {
            str(name): AdapterRange(
                scale=given.get("scale", 1.0), scale_max=given.get("scale_max", 1.0)
            )
            for name, given in listed.items()
            if isinstance(given, dict)
        }

    @property
    def known_controls(self) -> Mapping[str, StrengthRange]:
        """Control networks (ControlNet) by name, from the engine's options."""
        listed = self.options.get("controls")
        return _strengths(listed) if isinstance(listed, dict) else {}

    @property
    def known_references(self) -> Mapping[str, StrengthRange]:
        """Kinds of references (IP-Adapter): ``image``, if the engine's options have one."""
        return _strengths({"image": self.options.get("reference")})

    @property
    def unguided(self) -> dict[str, str]:
        """Values of the conditions of prices for a request without such pictures."""
        listed = {"control": self.known_controls, "reference": self.known_references}
        return {name: "none" for name, known in listed.items() if known}

    @property
    def known_voices(self) -> tuple[str, ...]:
        """Supported voices: those listed, or those named in the engine's options."""
        return self.voices or tuple(map(str, self.options.get("voices") or ()))

    @property
    def known_languages(self) -> tuple[str, ...]:
        return self.languages or tuple(map(str, self.options.get("languages") or ()))

    @property
    def discount(self) -> str | None:
        """The discount in batches, or None if the model is not sold in batches."""
        return self.batch_discount if self.batch and self.workflow is None else None

    def at(self, price: Price) -> CatalogEntry:
        """Return the entry with another price than that of the file."""
        if price == self.selling_price:
            return self
        lines = tuple(
            PriceLine.model_construct(
                unit=part.unit, amount=part.amount_nanos, per=part.per, when=dict(part.when)
            )
            for part in price.components
        )
        return self.model_copy(update={"price": lines, "minimum": price.minimum_nanos or None})


def _strengths(listed: Mapping[Any, Any]) -> dict[str, StrengthRange]:
    return {
        str(name): StrengthRange(given.get("strength", 1.0), given.get("strength_max", 1.0))
        for name, given in listed.items()
        if isinstance(given, dict)
    }


class Catalog(CatalogModel):
    """The contents of ``catalog.yaml``."""

    version: Literal[1] = 1
    gpu_hours: dict[Tag, Amount] = {}
    """Price of an hour of a device, by words of its name, such as ``H200`` or ``cpu``."""
    models: Annotated[tuple[CatalogEntry, ...], Field(min_length=1)]
    aliases: dict[Name, Name] = {}
    """Names of models that the entries do not have, each with the entry that serves it."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        found = (
            *names.repeated_names(self.models),
            *rules.misfits(self.models),
            *names.lost_aliases(self.aliases, self.models),
        )
        if found:
            raise rules.Conflicts(found)
        return self

    def expense_rates(self, hour_nanos: int | None) -> ExpenseRates:
        """Return what the operator pays; ``hour_nanos`` for an hour of any other device."""
        buying = {entry.name: entry.buying_price for entry in self.models}
        upstreams = {name: price for name, price in buying.items() if price is not None}
        return ExpenseRates(upstreams, self.gpu_hours, hour_nanos)
