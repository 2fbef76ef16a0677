"""A super-resolution checkpoint that upscales a batch of tiles of equal size.

Compact networks are loaded here. Other architectures are loaded by spandrel, if it is installed; it
is not a dependency of the worker, because it needs a torchvision of the same build as torch.
Weights are read as data only, never unpickled.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from workers.contract.models import ModelSpec
from workers.engines.upscale.compact import Compact
from workers.engines.upscale.options import Options

_SMALL: Final = 1_000_000
"""Maximum number of weights for which a CPU uses large tiles."""
_TILE: Final = 192
_TILE_SLOW: Final = 64
_STEP_PIXELS_CUDA: Final = 1_048_576
_SUFFIXES: Final = (".safetensors", ".pth", ".pt")
_WRAPPERS: Final = ("params_ema", "params", "state_dict", "model_state_dict")
"""Keys under which training programs store the weights."""


class Network:
    """Raise ``ValueError`` if the checkpoint cannot be read."""

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        self._device = options.torch_device
        self._dtype = options.torch_dtype
        self.module, self.scale, self._call = _build(_read_weights(find_weights(spec)))
        self.module.eval().requires_grad_(False).to(self._device, self._dtype)
        weights = sum(weight.numel() for weight in self.module.parameters())
        fast = self._device.type == "cuda" or weights <= _SMALL
        self.tile = options.tile or max(2 * options.overlap, _TILE if fast else _TILE_SLOW)
        self.step_pixels = options.step_pixels or (
            _STEP_PIXELS_CUDA if self._device.type == "cuda" else self.tile**2
        )

    def upscale(self, tiles: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Upscale ``(B, h, w, 3)`` to ``(B, h * scale, w * scale, 3)``, on the CPU.

        Values are about 0 to 1 and not clipped. Raise torch's ``OutOfMemoryError``.
        """
        low = torch.from_numpy(tiles).to(self._device).permute(0, 3, 1, 2)
        with torch.no_grad():
            upscaled = self._call(low.to(self._dtype) / 255)
            return upscaled.float().permute(0, 2, 3, 1).cpu().numpy()


def find_weights(spec: ModelSpec) -> Path:
    """Return the file of weights: the checkpoint itself, or the only one in its directory."""
    path = Path(spec.checkpoint or "")
    if path.is_file():
        return path
    found = [file for suffix in _SUFFIXES for file in sorted(path.glob(f"*{suffix}"))]
    if not found:
        raise ValueError(f"{path} contains no weights; a file in {', '.join(_SUFFIXES)} is needed")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} contains several files of weights: {names}; name the one to use")
    return found[0]


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read as weights: {error}") from error
    for name in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in found.values()
    ):
        raise ValueError(f"{path.name} does not contain weights only")
    return dict(found)


def _build(
    weights: dict[str, torch.Tensor],
) -> tuple[torch.nn.Module, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the network, its upscaling factor, and the function that runs it."""
    try:
        compact = Compact.from_weights(weights)
        return compact, compact.scale, compact
    except ValueError:
        if importlib.util.find_spec("spandrel") is None:
            raise ValueError(
                "these are not the weights of a compact network; other architectures are read by "
                "spandrel, which is not installed (`pip install 'tollgate[upscale]'`)"
            ) from None
    try:
        spandrel = importlib.import_module("spandrel")
        found = spandrel.ModelLoader(device="cpu").load_from_state_dict(weights)
    except Exception as error:
        raise ValueError(f"spandrel cannot load the checkpoint: {error}") from error
    if not isinstance(found, spandrel.ImageModelDescriptor) or found.purpose != "SR":
        raise ValueError(f"{found.architecture.name} is not an upscaling network")
    if (found.input_channels, found.output_channels) != (3, 3):
        raise ValueError(f"{found.architecture.name} does not use three channels")
    return found.model, found.scale, found
