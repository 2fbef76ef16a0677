"""The noise of a sampled token: a hash of seed, position and token, without any state.

Adding it to every score and taking the highest samples by the scores (Gumbel, 1954). The same seed
gives the same tokens, whatever else is running, and on every device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

_MASK: Final = 2**64 - 1
_LOW: Final = 2**31 - 1
"""Hashes have 31 bits, so that shifting a signed integer brings in no sign."""
_STEP: Final = 0x9E3779B9 - 2**32
_FIRST: Final = 0x21F0AAAD
_SECOND: Final = 0x735A2D97
_LARGEST: Final = 1 - 2.0**-24
"""Largest number below 1; the logarithm of what 1 leaves would be infinite."""


def key_of(seed: int, position: int) -> tuple[int, int]:
    """Return two numbers of 31 bits for all tokens at a position."""
    mixed = _mix(_mix(seed & _MASK) + position)
    return mixed & _LOW, mixed >> 33


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, float32 of the broadcast shape. All inputs are int32, for operations
    that torch has on every device.

    ``keys`` is ``(rows, 2)``; ``tokens`` ``(vocabulary,)``, or ``(rows, count)`` to ask for a few.
    """
    state = (tokens * _STEP + keys[:, :1]).bitwise_and_(_LOW)
    state = state.bitwise_xor_(state >> 16).mul_(_FIRST).bitwise_and_(_LOW)
    state = state.bitwise_xor_(keys[:, 1:])
    state = state.bitwise_xor_(state >> 15).mul_(_SECOND).bitwise_and_(_LOW)
    state = state.bitwise_xor_(state >> 15)
    uniform = state.float().add_(0.5).mul_(2.0**-31).clamp_max_(_LARGEST)
    # Small uniforms become large noise, and floats are finest near zero: the tail is not cut.
    return uniform.neg_().log1p_().neg_().log_().neg_()


# The codebooks of a speech model have a range each, up to 32 of them.
@lru_cache(maxsize=64)
def token_range(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(size, dtype=torch.int32, device=device)


def _mix(value: int) -> int:
    """Hash 64 bits (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
