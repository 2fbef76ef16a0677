"""Control networks (ControlNet) that requests choose from the list of a catalog entry.

A control network reads a picture, such as edges or a depth map, beside the latents, and adds to the
activations of the denoiser. It runs in the library's pipeline for it, over the components of the
checkpoint. Requests with the same network share its batches whatever their strengths, because the
network computes at strength 1 and each request scales its own rows, as the library would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import diffusers
import torch
from PIL import Image

from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion.options import Control, Options
from workers.engines.torch_engine import InputError


class ControlledPipeline(NamedTuple):
    """The library's pipeline with a control network, and its argument for the control picture."""

    pipeline: str
    argument: str = "control_image"


def _family(name: str, *, first: str = "control_image") -> dict[str, ControlledPipeline]:
    return {
        f"{name}Pipeline": ControlledPipeline(f"{name}ControlNetPipeline", first),
        f"{name}Img2ImgPipeline": ControlledPipeline(f"{name}ControlNetImg2ImgPipeline"),
        f"{name}InpaintPipeline": ControlledPipeline(f"{name}ControlNetInpaintPipeline"),
    }


PIPELINES: Final[Mapping[str, ControlledPipeline]] = {
    **_family("StableDiffusion", first="image"),
    **_family("StableDiffusionXL", first="image"),
    **_family("Flux"),
}
"""By the pipeline without control."""
_FLUX: Final = "Flux"


@dataclass(frozen=True, slots=True)
class ChosenControl:
    """A request's control network, its picture and its strength."""

    name: str
    image: Image.Image
    strength: float

    def arguments(self, pipeline: str) -> dict[str, Any]:
        """Return the arguments of a pipeline; ``pipeline`` is the one without control."""
        return {
            PIPELINES[pipeline].argument: self.image,
            "controlnet_conditioning_scale": self.strength,
        }


def load(
    pipeline: str, options: Options, batcher: CooperativeBatcher
) -> dict[str, torch.nn.Module]:
    """Load the control networks of an entry. Raise ``ValueError`` if one cannot be read."""
    library: Any = diffusers
    kind = library.FluxControlNetModel if pipeline.startswith(_FLUX) else library.ControlNetModel
    networks = {}
    for name, control in options.controls.items():
        try:
            with warnings.catch_warnings():  # about a module that the library itself imports
                warnings.filterwarnings("ignore", ".*FluxPosEmbed", FutureWarning)
                network = kind.from_pretrained(
                    control.checkpoint,
                    dtype=options.torch_dtype,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"the control network {name} cannot be read: {error}") from error
        network.eval().requires_grad_(requires_grad=False).to(options.torch_device)
        network.forward = _make_point(name, network, batcher)
        networks[name] = network
    return networks


def _make_point(name: str, network: Any, batcher: CooperativeBatcher) -> Callable[..., Any]:
    point = batcher.batch_point(f"control {name}", network.forward, "forward", module=network)

    def forward(*args: Any, conditioning_scale: float = 1.0, **kwargs: Any) -> Any:
        return _scale(point(*args, **kwargs), conditioning_scale)

    return forward


def _scale(samples: Any, strength: float) -> Any:
    """Scale all tensors in a tree of lists and tuples."""
    if isinstance(samples, list | tuple):
        return type(samples)(map(partial(_scale, strength=strength), samples))
    return samples * strength if torch.is_tensor(samples) else samples


def choose(
    name: str,
    strength: float | None,
    listed: Mapping[str, Control],
    pipeline: str,
    image: Callable[[], Image.Image],
) -> ChosenControl:
    """Return what a request chooses. Raise ``InputError`` if it is not listed or too strong."""
    control = listed.get(name)
    if control is None:
        known = ", ".join(listed) or "none"
        raise InputError(
            "invalid_input",
            f"{name!r} is not a control network; this model has {known}.",
            "control",
        )
    if pipeline not in PIPELINES:
        raise InputError("unsupported_parameter", "This task takes no control picture.", "control")
    strength = control.strength if strength is None else strength
    if not 0 <= strength <= control.strength_max:
        raise InputError(
            "invalid_input",
            f"control_strength is {strength:g}; it can be 0 to {control.strength_max:g}.",
            "control_strength",
        )
    return ChosenControl(name, image(), strength)
