"""Options of the diffusion engine in a catalog entry, validated."""

from __future__ import annotations

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights merged into the denoiser when it is loaded, for all requests."""

    checkpoint: str
    """A directory or a ``.safetensors`` file, relative to the catalog's directory."""
    scale: float = 1.0


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that a request can add by name."""

    checkpoint: str
    """A directory or a ``.safetensors`` file, relative to the catalog's directory."""
    scale: float = 1.0
    """Scale if the request names none."""
    scale_max: float = 1.0


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A control network (ControlNet) that a request can add by name, with a picture."""

    checkpoint: str
    """A directory in diffusers' format, relative to the catalog's directory."""
    strength: float = 1.0
    """Strength if the request names none."""
    strength_max: float = 1.0


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that read a reference image (IP-Adapter)."""

    checkpoint: str
    """A ``.safetensors`` file, relative to the catalog's directory."""
    image_encoder: str | None = None
    """Directory of the CLIP image encoder. Default: ``image_encoder`` beside the checkpoint."""
    strength: float = 1.0
    """Strength if the request names none."""
    strength_max: float = 1.0


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    slots: int = 8
    """Maximum images or videos generated at a time, over all requests."""
    rows: int | None = None
    """Maximum rows of a forward; guidance takes two per image. Default: twice the slots."""
    tiling: int | None = 1_500_000
    """Pixels of an output, over all frames, above which the autoencoder works in tiles; it computes
    the rows of a larger batch one by one. Null: neither."""
    steps: int = 20
    """Steps if the request names none."""
    strength: float | None = None
    """Strength if the request names none. Default: 0.6, for inpainting 1."""
    guidance: float | None = None
    """Guidance if the request names none. Default: the pipeline's own."""
    scheduler: str | None = None
    """Name of a scheduler, see ``schedulers``. Default: the checkpoint's own."""
    lora: tuple[Lora, ...] = ()
    adapters: dict[str, Adapter] = {}
    """LoRA weights that requests choose by name."""
    controls: dict[str, Control] = {}
    """Control networks that requests choose by name."""
    reference: Reference | None = None
    """What reads the reference images of requests."""
    safety: bool = False
    """Whether the checkpoint's safety checker checks every image; an error if it has none."""
    upscaler: str | None = None
    """Checkpoint of an upscaler: a directory or, in a catalog, the name of another entry."""
    frames: int | None = None
    """Frames of a video if the request names no length."""
    fps: int = 8


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    options = read(spec, Options, counts=("rows", "tiling", "steps", "frames", "fps"))
    for name, adapter in options.adapters.items():
        if not 0 <= adapter.scale <= adapter.scale_max:
            raise ValueError(
                f"adapters.{name}.scale is {adapter.scale:g}; it can be 0 to scale_max, which is "
                f"{adapter.scale_max:g}"
            )
    guides: dict[str, Control | Reference] = {
        f"controls.{name}": control for name, control in options.controls.items()
    }
    if options.reference is not None:
        guides["reference"] = options.reference
    for name, guide in guides.items():
        if not 0 <= guide.strength <= guide.strength_max:
            raise ValueError(
                f"{name}.strength is {guide.strength:g}; it can be 0 to strength_max, which is "
                f"{guide.strength_max:g}"
            )
    return options
