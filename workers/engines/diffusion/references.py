"""Picture prompts (IP-Adapter): a request's reference image is read beside its text.

The adapter's weights stay apart from the denoiser's. Its attention is switched on for batches of
requests with a reference, of one strength, and off for all others, which so compute exactly what
they would without the adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

from workers.engines.diffusion.options import Options, Reference
from workers.engines.torch_engine import InputError

_ENCODER: Final = "image_encoder"


@dataclass(frozen=True, slots=True)
class ChosenReference:
    """A request's reference image, and its strength."""

    image: Image.Image
    strength: float


def choose(
    strength: float | None,
    listed: Reference | None,
    pipeline: Any,
    image: Callable[[], Image.Image],
    *,
    beside: str = "",
) -> ChosenReference:
    """Return what a request chooses. Raise ``InputError`` if the pipeline does not support it.

    ``beside``: what else the request has that decides on its pipeline, for the message.
    """
    if listed is None or "ip_adapter_image" not in inspect.signature(pipeline.__call__).parameters:
        raise InputError(
            "unsupported_parameter",
            f"This model takes no reference image{beside}.",
            "reference_image",
        )
    strength = listed.strength if strength is None else strength
    if not 0 <= strength <= listed.strength_max:
        raise InputError(
            "invalid_input",
            f"reference_strength is {strength:g}; it can be 0 to {listed.strength_max:g}.",
            "reference_strength",
        )
    return ChosenReference(image(), strength)


def encoder_path(reference: Reference) -> Path:
    """Return the directory of the image encoder: by default the one beside the weights."""
    return Path(reference.image_encoder or Path(reference.checkpoint).parent / _ENCODER)


def load(pipeline: Any, denoiser: Any, options: Options) -> ReferenceSwitch | None:
    """Load the adapter of an entry, and the encoder of its images. Return its switch, if any.

    Raise ``ValueError`` if they do not fit the pipeline.
    """
    reference = options.reference
    if reference is None:
        return None
    if not hasattr(pipeline, "load_ip_adapter"):
        raise ValueError(f"{type(pipeline).__name__} does not support a reference (IP-Adapter)")
    plain = dict(denoiser.attn_processors)
    try:
        if getattr(pipeline, "image_encoder", None) is None:
            encoder: Any = CLIPVisionModelWithProjection.from_pretrained(
                encoder_path(reference), dtype=options.torch_dtype, local_files_only=True
            )
            encoder.eval().requires_grad_(requires_grad=False)
            side = encoder.config.image_size
            processor: Any = CLIPImageProcessor(size=side, crop_size=side)
            pipeline.register_modules(image_encoder=encoder, feature_extractor=processor)
        path = Path(reference.checkpoint)
        pipeline.load_ip_adapter(
            str(path.parent),
            subfolder="",
            weight_name=path.name,
            low_cpu_mem_usage=False,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the reference (IP-Adapter) cannot be loaded: {error}") from error
    denoiser.encoder_hid_proj.to(options.torch_dtype)
    denoiser.requires_grad_(requires_grad=False)
    return ReferenceSwitch(denoiser, plain)


class ReferenceSwitch:
    """Switches the adapter's attention on, at a strength, or off, before a batch is computed.

    The projection of images stays in place, because pipelines examine it between batches.
    """

    def __init__(self, denoiser: Any, plain: dict[str, Any]) -> None:
        self._denoiser = denoiser
        self._adapted = dict(denoiser.attn_processors)
        self._plain = {**self._adapted, **plain}
        self._mode = denoiser.config.encoder_hid_dim_type
        self._active: float | None = None
        self._is_on = True

    def __call__(self, strength: float | None) -> None:
        if self._is_on != (strength is not None):
            self._is_on = strength is not None
            chosen = self._adapted if self._is_on else self._plain
            self._denoiser.set_attn_processor(dict(chosen))
            self._denoiser.config.encoder_hid_dim_type = self._mode if self._is_on else None
        if strength is not None and strength != self._active:
            self._active = strength
            for processor in self._adapted.values():
                if hasattr(processor, "to_k_ip"):
                    processor.scale = [strength]
