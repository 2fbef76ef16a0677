"""Creates a model from a checkpoint with quantised weights.

The library creates the model and reads every weight from an object that unpacks it at that moment,
so that few expanded matrices exist beside the model. A linear layer that keeps its stored weights
is first given a matrix that takes no memory, then replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig

from workers.engines.quantized.formats import StoredFormat
from workers.engines.quantized.layers import keep
from workers.engines.quantized.matrices import MAIN, NEEDED, PARTS, Matrix, read_matrix


def load(
    loader: Any,
    path: Path,
    stored: StoredFormat,
    device: torch.device | None,
    arguments: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return a model and the library's report, as ``from_pretrained`` with these ``arguments``.

    Linear layers keep their weights on ``device``, all but a head; without one nothing is kept.
    Everything else is expanded to the type in ``arguments``. Raise ``ValueError`` if parts of a
    matrix are missing or do not fit each other.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with contextlib.suppress(AttributeError):
        del config.quantization_config
    with torch.device("meta"):
        sketch = loader.from_config(config)
    weights = _Weights(path, stored)
    kept = {}
    if device is not None and stored.keeps is not None:
        for name in _linear_layers(sketch) & weights.matrices.keys():
            if (layer := keep(weights.read(name), None, stored.keeps)) is not None:
                kept[name] = layer.to(device)
    state: dict[str, Any] = {**weights.others}
    for name in weights.matrices:
        read = functools.partial(weights.expand, name)
        if name in kept:
            shape = sketch.get_submodule(name).weight.shape
            read = functools.partial(_empty, shape, arguments["dtype"])
        state[f"{name}.weight"] = _Deferred(read)
    model, report = type(sketch).from_pretrained(None, config=config, state_dict=state, **arguments)
    for problem in weights.problems:
        raise problem
    for name, layer in kept.items():
        layer.bias = model.get_submodule(name).bias
        model.set_submodule(name, layer)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model, report


def _linear_layers(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


class _Deferred:
    """Stands for a tensor in a file, as the library's own readers do."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()


class _Weights:
    """The tensors of a checkpoint's files, in which the parts of a matrix can be apart."""

    def __init__(self, path: Path, stored: StoredFormat) -> None:
        self._path = path
        self._stored = stored
        self._parts: dict[str, dict[str, Callable[[], torch.Tensor]]] = {}
        self.others: dict[str, Any] = {}
        """Readers of what is not quantised, by name."""
        self.problems: list[ValueError] = []
        """What went wrong when the library read, which reports it without the reason."""
        plain: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                layer, _, part = name.rpartition(".")
                if part in PARTS:
                    parts = self._parts.setdefault(layer, {})
                    parts[part] = functools.partial(opened.get_tensor, name)
                else:
                    plain[name] = opened.get_slice(name)
        for name, tensor in plain.items():
            layer, _, part = name.rpartition(".")
            if part == MAIN[stored.layout] and _is_quantized(self._parts.get(layer, {})):
                self._parts[layer][part] = functools.partial(tensor.__getitem__, ...)
            else:
                self.others[name] = tensor
        main = MAIN[stored.layout]
        self.matrices = {layer: parts for layer, parts in self._parts.items() if main in parts}
        """Readers of the parts of each matrix, by its layer."""
        for layer, parts in self._parts.items():
            self._check(layer, parts)

    def _check(self, layer: str, parts: dict[str, Any]) -> None:
        known = set(parts) & {*NEEDED[self._stored.layout], "weight_scale", "weight_scale_inv"}
        for part in NEEDED[self._stored.layout]:
            if known and part not in parts:
                raise ValueError(
                    f"the weights in {self._path} do not fit its quantization_config: {layer} has "
                    f"no {part}"
                )

    def read(self, layer: str) -> Matrix:
        """Raise ``ValueError`` if the parts of a matrix do not fit each other."""
        try:
            return read_matrix(self.matrices[layer], self._stored)
        except (ValueError, RuntimeError, LookupError) as error:
            raise ValueError(
                f"the weights of {layer} in {self._path} cannot be read: {error}"
            ) from error

    def expand(self, layer: str) -> torch.Tensor:
        try:
            return self.read(layer).widen()
        except ValueError as error:
            self.problems.append(error)
            raise


def _is_quantized(parts: dict[str, Any]) -> bool:
    return "weight_scale" in parts or "weight_scale_inv" in parts
