"""How long a job takes and how much of the cache it holds, from sizes alone.

Reading a prompt costs two operations for each weight and token; a decode step reads every weight
once, however many write along, so the estimate is that of a job that has the device to itself and
writes as much as it may. Good to a small factor, which is all that planning needs: jobs are metered
by what they took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import safe_open

from workers.contract.jobs import ChatInput, Prompt
from workers.contract.models import ModelSpec
from workers.engines.llm.cache import CacheShape
from workers.engines.llm.checkpoint import directory, read_shape, weight_files
from workers.engines.llm.options import Options
from workers.engines.precision import QUANTIZED
from workers.protocol.engine import Estimate


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a device: operations and bytes in a microsecond, and what a layer costs to launch."""

    operations: float
    bytes: float
    layer_us: float


SPEEDS: Final = {
    # One core of a server, measured: 90 GFLOP/s in float32, and a millisecond for a tiny layer.
    "cpu": Speed(operations=50e3, bytes=10e3, layer_us=900),
    # Half of what an H200 reaches with large matrices and with copies.
    "cuda": Speed(operations=400e6, bytes=2e6, layer_us=100),
}
_PROMPT_BYTES_PER_TOKEN: Final = 3
"""Of text, in a vocabulary of ordinary size."""


@dataclass(frozen=True, slots=True)
class Sizes:
    weights: int
    weight_bytes: int
    context: int
    shape: CacheShape
    speed: Speed

    def estimate(self, chat: ChatInput) -> Estimate:
        read_tokens = sum(map(_tokens, chat.prompts)) + sum(
            _tokens(message.content) for message in chat.messages
        )
        launch_us = self.speed.layer_us * self.shape.layers
        read_us = launch_us + 2 * self.weights * read_tokens / self.speed.operations
        write_us = chat.max_tokens * (launch_us + self.weight_bytes / self.speed.bytes)
        return Estimate(
            device_us=round(read_us + write_us),
            bytes=chat.choices
            * min(self.context, math.ceil(read_tokens) + chat.max_tokens)
            * self.shape.token_bytes,
        )


def _tokens(prompt: Prompt) -> float:
    if isinstance(prompt, str):
        return len(prompt.encode()) / _PROMPT_BYTES_PER_TOKEN
    return len(prompt)


def read_sizes(spec: ModelSpec, options: Options) -> Sizes:
    """Raise ``ValueError`` if there is no checkpoint that could be loaded."""
    weights = sum(map(_count_weights, weight_files(directory(spec))))
    context, shape = read_shape(spec, options)
    size = 1 if options.dtype in QUANTIZED else options.torch_dtype.itemsize
    return Sizes(weights, weights * size, context, shape, SPEEDS[options.torch_device.type])


def _count_weights(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        shapes = (tensors.get_slice(name).get_shape() for name in list(tensors.keys()))
        return sum(map(math.prod, shapes))
