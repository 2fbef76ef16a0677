"""The JSON of a plan, the same for the command and over HTTP."""

from __future__ import annotations

from typing import Literal, TypedDict


class ShapeView(TypedDict):
    """The dimensions of a language model."""

    parameters: int
    active_parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    experts: int | None
    experts_used: int | None
    context: int | None


class PartView(TypedDict):
    """A network of a model of pictures, video or audio. ``operations`` are those of one pass; null
    if they cannot be computed from the configuration."""

    name: str
    parameters: int
    operations: int | None
    runs: int


class TokensView(TypedDict):
    """What a request of text takes."""

    dtype: str
    kv_dtype: str
    batch: int
    context: int
    input_tokens: int
    output_tokens: int
    kv_bytes_per_token: int


class MediaOrderView(TypedDict):
    """What one picture, video or recording takes."""

    dtype: str
    batch: int
    width: int
    height: int
    seconds: float
    frames: int
    steps: int
    guidance: float


class MillionView(TypedDict):
    """Cost and price of a million tokens in USD."""

    roofline: str
    expected: str
    catalog: str | None
    margin_percent: float | None


class TextSpeedView(TypedDict):
    """Memory and upper bounds of a language model on a device."""

    kv_room_bytes: int
    kv_room_tokens: int
    sequences: int
    decode_tokens_per_s_batch_1: float
    decode_batch: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float | None
    ridge_operations_per_byte: float | None
    ridge_tokens: int | None
    usd_per_million_output_tokens: MillionView | None
    usd_per_million_input_tokens: MillionView | None


class ResultView(TypedDict):
    """One result on a device: ``computed`` at the assumed efficiency, or ``measured`` here.

    ``device_seconds`` is its share of one device. ``devices`` is the number for the load.
    """

    basis: Literal["computed", "measured"]
    device_seconds: float
    results_per_second: float
    cost_usd: str | None
    price_usd: str | None
    margin_percent: float | None
    devices: int | None


class PlannedDeviceView(TypedDict):
    """The figures of one device; ``result`` is null if they cannot be computed."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    hour_usd: str | None
    fits: bool
    devices_needed: int
    text: TextSpeedView | None
    result: ResultView | None


class MeasuredView(ResultView):
    """The mean of requests of this installation on one device at one precision."""

    device: str
    dtype: str
    requests: int


class PlanView(TypedDict):
    object: Literal["plan"]
    model: str
    task: str
    source: str
    parameters: int
    weight_bytes: int
    shape: ShapeView | None
    parts: list[PartView] | None
    request: TokensView | MediaOrderView
    results_per_second: float | None
    """The load that devices are counted for."""
    devices: list[PlannedDeviceView]
    measured: list[MeasuredView]
    assumptions: list[str]
