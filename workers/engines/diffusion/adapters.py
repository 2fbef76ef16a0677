"""LoRA adapters that requests choose from the list of a catalog entry.

Adapters are loaded beside the weights and stay apart from them. Requests with the same adapters and
scales share a batch; before it, exactly these are activated in the network that computes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters
from peft.tuners.tuners_utils import BaseTunerLayer

from workers.engines.diffusion.options import Adapter
from workers.engines.torch_engine import InputError

Selection: TypeAlias = tuple[tuple[str, float], ...]
"""Adapters with their scales, sorted by name. Empty: the weights of the checkpoint alone."""
NO_ADAPTERS: Final[Selection] = ()


def load_weights(pipeline: Any, path: Path, *, name: str | None = None) -> None:
    """Load LoRA weights from a file or directory. Raise ``ValueError`` if they do not fit."""
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(f"{type(pipeline).__name__} does not support LoRA")
    place = (str(path.parent), path.name) if path.is_file() else (str(path), None)
    try:
        with warnings.catch_warnings():  # about a second adapter, which is what is meant
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            pipeline.load_lora_weights(place[0], weight_name=place[1], adapter_name=name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"could not load the LoRA {path.name}: {error}") from error


def load(pipeline: Any, adapters: Mapping[str, Adapter]) -> None:
    """Load the adapters of an entry. Raise ``ValueError`` if one does not fit the pipeline."""
    for name, adapter in adapters.items():
        load_weights(pipeline, Path(adapter.checkpoint), name=_key(name))


def select(requested: Mapping[str, float | None], listed: Mapping[str, Adapter]) -> Selection:
    """Return what a request selects. Raise ``InputError`` if it is not listed or too strong."""
    selected = []
    for name, scale in sorted(requested.items()):
        adapter = listed.get(name)
        if adapter is None:
            known = ", ".join(listed) or "none"
            raise InputError(
                "invalid_input", f"{name!r} is not an adapter; this model has {known}.", "adapters"
            )
        scale = adapter.scale if scale is None else scale
        if not 0 <= scale <= adapter.scale_max:
            raise InputError(
                "invalid_input",
                f"the scale of {name} is {scale:g}; it can be 0 to {adapter.scale_max:g}.",
                "adapters",
            )
        selected.append((name, scale))
    return tuple(selected)


class Switch:
    """Activates adapters in one network before it computes a batch."""

    def __init__(self, part: torch.nn.Module) -> None:
        self._part = part
        self._known: set[str] = set()
        for module in part.modules():
            if isinstance(module, BaseTunerLayer):
                self._known.update(getattr(module, "scaling", {}))
        self._active: Selection | None = None

    def __call__(self, selection: Selection | None) -> None:
        chosen = selection or NO_ADAPTERS
        mine = tuple((name, scale) for name, scale in chosen if _key(name) in self._known)
        if not self._known or mine == self._active:
            return
        set_adapter_layers(self._part, enabled=bool(mine))
        if mine:
            names = [_key(name) for name, _ in mine]
            set_weights_and_activate_adapters(self._part, names, [scale for _, scale in mine])
            self._part.requires_grad_(requires_grad=False)
        self._active = mine


def _key(name: str) -> str:
    """Return the library's name of an adapter, which is part of a module's path."""
    return "adapter_" + name.replace(".", "_dot_")
