"""Types of the catalog's JSON; the OpenAPI document is generated from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict


class PriceLineView(TypedDict):
    """One component of a price, in USD as a decimal string."""

    unit: str
    amount: str
    per: int
    when: dict[str, Any] | None


class BatchPriceView(TypedDict):
    """The price of an entry in batches."""

    discount: str
    price: list[PriceLineView]
    minimum: str | None


class WorkflowInputView(TypedDict):
    type: str
    required: bool
    default: Any
    description: str


class WorkflowStepView(TypedDict):
    name: str
    model: str
    task: str | None
    retries: int
    when: Any


class WorkflowView(TypedDict):
    inputs: dict[str, WorkflowInputView]
    steps: list[WorkflowStepView]
    priced_by: Literal["workflow", "steps"]


class ExpectedView(TypedDict):
    """Usual duration of a request, in seconds."""

    least: int
    most: int
    is_guess: bool


class ParameterView(TypedDict):
    """A parameter of a vendor's model. What ``guesses`` names is not known for certain, and
    refuses no request."""

    name: str
    vendor_name: str
    type: str
    required: bool
    options: list[Any]
    min: float | None
    max: float | None
    pixels: list[int] | None
    default: Any
    guesses: list[str]
    description: str | None


class ContractView(TypedDict):
    """What a vendor's model accepts; if it is complete, other parameters are refused."""

    is_complete: bool
    expected_seconds: ExpectedView
    strengths: list[str]
    notes: list[str]
    parameters: list[ParameterView]
    forbidden: list[dict[str, Any]]
    example: dict[str, Any]


class TypicalOrderView(TypedDict):
    """One result as it is usually ordered; the unit of comparison between models."""

    task: str
    quantities: dict[str, float]
    attributes: dict[str, str]


class EntryView(TypedDict):
    """A catalog entry, with all of its fields."""

    name: str
    object: Literal["catalog.entry"]
    aliases: list[str]
    task: str
    also: Sequence[str]
    available: bool
    reason: str | None
    reason_detail: NotRequired[str | None]
    canary: NotRequired[dict[str, float]]
    typical_price: str | None
    typical_order: TypicalOrderView
    price: list[PriceLineView]
    minimum: str | None
    from_price: str | None
    family: str | None
    vendor: str | None
    description: str
    license: str | None
    route: str
    workflow: WorkflowView | None
    context: int | None
    limits: dict[str, Any]
    default_parameters: dict[str, Any]
    slo: dict[str, Any] | None
    sizes: list[str]
    qualities: dict[str, dict[str, Any]]
    schedulers: Sequence[str]
    resolutions: list[str]
    adapters: dict[str, dict[str, float]]
    controls: dict[str, dict[str, float]]
    reference: dict[str, float] | None
    voices: list[str]
    languages: list[str]
    good_for: list[str]
    tier: str | None
    roles: list[str]
    why: str | None
    strengths: list[str]
    vocabulary: list[str] | None
    examples: list[dict[str, Any]]
    contract: ContractView | None


class WhosePriceView(TypedDict):
    """Whether the price is a price override of the account or the list price."""

    price_of: Literal["account", "list"]


class BatchableView(TypedDict):
    batch: BatchPriceView | None


class OfferedEntryView(EntryView, BatchableView, WhosePriceView):
    """A catalog entry with its price in batches."""


class ArchitectureView(TypedDict):
    input_modalities: Sequence[str]
    output_modalities: Sequence[str]
    modality: str
    tokenizer: str | None
    instruct_type: str | None


class TopProviderView(TypedDict):
    context_length: int | None
    max_completion_tokens: int | None
    is_moderated: bool


class ModelLinksView(TypedDict):
    details: str


class ModelView(TypedDict):
    """A model in OpenAI's list, with OpenRouter's fields and our own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    canonical_slug: str
    aliases: list[str]
    name: str
    description: str
    context_length: int | None
    architecture: ArchitectureView
    pricing: Mapping[str, str]
    top_provider: TopProviderView
    per_request_limits: None
    links: ModelLinksView
    supported_parameters: list[str]
    supported_voices: list[str] | None
    supported_adapters: list[str] | None
    default_parameters: dict[str, Any]
    task: str
    available: bool
    reason: str | None
    price: list[PriceLineView]


class OfferedModelView(ModelView, WhosePriceView):
    """A model with the account's price; ``alias_of`` if it was requested by an alias."""

    alias_of: NotRequired[str]


class NextView(TypedDict):
    next: str | None


class ModelsView(TypedDict):
    object: Literal["list"]
    data: list[OfferedModelView]
    total_count: int
    links: NextView


class ToolChoiceView(TypedDict):
    """Values of ``tool_choice`` that a model accepts."""

    auto: bool
    function: bool
    none: bool
    required: bool


class ProviderView(TypedDict):
    """The provider of a model, with OpenRouter's fields."""

    name: str
    model_id: str
    model_name: str
    provider_name: str
    tag: str
    context_length: int
    max_completion_tokens: int | None
    max_prompt_tokens: int | None
    pricing: Mapping[str, str]
    quantization: str | None
    status: int
    supported_parameters: list[str]
    supports_implicit_caching: bool
    supports_tool_choice: ToolChoiceView
    supports_voice_cloning: bool
    latency_last_30m: None
    throughput_last_30m: None
    uptime_last_5m: float | None
    uptime_last_30m: float | None
    uptime_last_1d: float | None


class ProvidersView(TypedDict):
    id: str
    name: str
    created: int
    description: str
    architecture: ArchitectureView
    endpoints: list[ProviderView]


class WhatIfView(TypedDict):
    """The cost of many typical results, in USD."""

    results: int
    cost: str


class PickedView(TypedDict):
    """One picked model; ``matched`` lists the stems of words that it was found by."""

    name: str
    task: str
    tier: str | None
    why: str
    typical_price: str
    typical_order: TypicalOrderView
    what_if: WhatIfView
    available: bool
    measured_seconds: float | None
    points: int
    matched: list[str]


class WishView(TypedDict):
    """How the question was understood."""

    task: str | None
    roles: list[str]
    words: list[str]
    unknown_words: list[str]
    budget: str | None


class LeftOutView(TypedDict):
    """A model that was found, but does not meet a condition."""

    name: str
    typical_price: str
    why: str


class PickView(TypedDict):
    """``today`` is the local model that runs now; ``message`` says why ``best`` is null."""

    object: Literal["catalog.pick"]
    asked: WishView
    best: PickedView | None
    cheaper: PickedView | None
    better: PickedView | None
    today: PickedView | None
    ranked: list[PickedView]
    left_out: list[LeftOutView]
    message: str | None
