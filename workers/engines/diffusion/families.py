"""The supported pipelines, their tasks, and how each is called.

A pipeline is listed if a test shows that its runs, batched at every forward, have the same results
as each alone. Any checkpoint whose ``model_index.json`` names a listed pipeline can be served;
others are refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import diffusers

from workers.contract.models import ModelSpec


@dataclass(frozen=True, slots=True)
class PipelineFamily:
    """How a pipeline is called. An argument whose name is None does not exist."""

    pipeline: str
    module: str = "diffusers"
    image: str | None = None
    """Name of the argument for source images."""
    images_max: int = 0
    """Maximum number of source images; if above 1, they are passed as a list."""
    mask: str | None = None
    """Name of the argument for a mask, if the pipeline requires one."""
    inpainting: PipelineFamily | None = None
    """Pipeline for requests with a mask. None: this one, with the blending of ``masks``."""
    strength: float | None = None
    """Default strength, from 0 (keep the source) to 1. None: there is no such argument."""
    guidance: str | None = "guidance_scale"
    negative: bool = True
    frames: bool = False
    """Whether it generates a video of ``num_frames``."""
    frame_step: int = 1
    """The number of frames must be 1 more than a multiple of this."""
    sized: bool = True
    """Whether it takes width and height; otherwise they are those of the source."""
    area: str | None = None
    """Name of the argument for the maximum area, if the pipeline chooses its own size."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def load_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.pipeline)


_POCKET_IMAGE: Final = PipelineFamily(
    "PocketImagePipeline",
    module="workers.engines.diffusion.pocket_image",
    image="image",
    images_max=2,
)
_POCKET_IMG2IMG: Final = PipelineFamily(
    "PocketImagePipeline",
    module="workers.engines.diffusion.pocket_image",
    image="image",
    images_max=1,
    strength=0.6,
)
_POCKET_VIDEO: Final = PipelineFamily(
    "PocketVideoPipeline",
    module="workers.engines.diffusion.pocket_video",
    image="image",
    images_max=1,
    frames=True,
)
_INSTRUCT_PIX2PIX: Final = PipelineFamily(
    "StableDiffusionInstructPix2PixPipeline", image="image", images_max=1, sized=False
)
_KONTEXT: Final = PipelineFamily(
    "FluxKontextPipeline",
    image="image",
    images_max=1,
    negative=False,
    area="max_area",
    extra={"_auto_resize": False},
)
_KONTEXT_INPAINT: Final = replace(
    _KONTEXT, pipeline="FluxKontextInpaintPipeline", mask="mask_image", strength=1.0
)


def _inpaint(pipeline: str, *, negative: bool = True) -> PipelineFamily:
    """An inpainting pipeline; its default strength keeps nothing of the masked area."""
    return PipelineFamily(
        pipeline, image="image", images_max=1, mask="mask_image", strength=1.0, negative=negative
    )


def _img2img(pipeline: str, inpaint: PipelineFamily, *, sized: bool = False) -> PipelineFamily:
    return PipelineFamily(
        pipeline,
        image="image",
        images_max=1,
        inpainting=inpaint,
        strength=0.6,
        sized=sized,
        negative=inpaint.negative,
    )


_SD_INPAINT: Final = _inpaint("StableDiffusionInpaintPipeline")
_SDXL_INPAINT: Final = _inpaint("StableDiffusionXLInpaintPipeline")
_SD3_INPAINT: Final = _inpaint("StableDiffusion3InpaintPipeline")
_FLUX_INPAINT: Final = _inpaint("FluxInpaintPipeline", negative=False)


FAMILIES: Final[Mapping[str, Mapping[str, PipelineFamily]]] = {
    "PocketImagePipeline": {
        "text-to-image": _POCKET_IMAGE,
        "image-to-image": _POCKET_IMG2IMG,
        "image-edit": _POCKET_IMAGE,
        "image-relight": _POCKET_IMAGE,
        "image-restyle": _POCKET_IMAGE,
        "image-blend": _POCKET_IMAGE,
    },
    "PocketVideoPipeline": {"text-to-video": _POCKET_VIDEO, "image-to-video": _POCKET_VIDEO},
    "StableDiffusionPipeline": {
        "text-to-image": PipelineFamily("StableDiffusionPipeline"),
        "image-to-image": _img2img("StableDiffusionImg2ImgPipeline", _SD_INPAINT),
    },
    "StableDiffusionInpaintPipeline": {"image-edit": _SD_INPAINT},
    "StableDiffusionXLPipeline": {
        "text-to-image": PipelineFamily("StableDiffusionXLPipeline"),
        "image-to-image": _img2img("StableDiffusionXLImg2ImgPipeline", _SDXL_INPAINT),
    },
    "StableDiffusionXLInpaintPipeline": {"image-edit": _SDXL_INPAINT},
    "StableDiffusion3Pipeline": {
        "text-to-image": PipelineFamily("StableDiffusion3Pipeline"),
        "image-to-image": _img2img("StableDiffusion3Img2ImgPipeline", _SD3_INPAINT, sized=True),
    },
    "FluxPipeline": {
        "text-to-image": PipelineFamily("FluxPipeline", negative=False),
        "image-to-image": _img2img("FluxImg2ImgPipeline", _FLUX_INPAINT, sized=True),
    },
    "FluxFillPipeline": {"image-edit": _inpaint("FluxFillPipeline", negative=False)},
    "StableDiffusionInstructPix2PixPipeline": dict.fromkeys(
        ("image-edit", "image-relight", "image-restyle"), _INSTRUCT_PIX2PIX
    ),
    "FluxKontextPipeline": dict.fromkeys(
        ("image-edit", "image-relight", "image-restyle"),
        replace(_KONTEXT, inpainting=_KONTEXT_INPAINT),
    ),
    "WanPipeline": {"text-to-video": PipelineFamily("WanPipeline", frames=True, frame_step=4)},
    "WanImageToVideoPipeline": {
        "image-to-video": PipelineFamily(
            "WanImageToVideoPipeline", image="image", images_max=1, frames=True, frame_step=4
        )
    },
    "LTXPipeline": {
        "text-to-video": PipelineFamily("LTXPipeline", frames=True, frame_step=8),
        "image-to-video": PipelineFamily(
            "LTXImageToVideoPipeline", image="image", images_max=1, frames=True, frame_step=8
        ),
    },
}
"""By the class named in the checkpoint, and the task."""

# Components whose forward is a batch point; which of the two decides the phase of their time.
DENOISERS: Final = ("unet", "transformer", "transformer_2")
ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")


def families_of(pipeline_class: str, spec: ModelSpec) -> Mapping[str, PipelineFamily]:
    """Return the families of an entry's tasks. Raise ``ValueError`` if one is not supported."""
    if pipeline_class not in FAMILIES:
        supported = ", ".join(FAMILIES)
        known = hasattr(diffusers, pipeline_class)
        unknown = "" if known else ", which the installed diffusers does not have"
        raise ValueError(
            f"unsupported pipeline {pipeline_class}{unknown}; supported are {supported}"
        )
    tasks = FAMILIES[pipeline_class]
    for task in (spec.task, *spec.also):
        if task not in tasks:
            raise ValueError(
                f"{pipeline_class} does not support {task}; it supports {', '.join(tasks)}"
            )
    return {task: tasks[task] for task in (spec.task, *spec.also)}
