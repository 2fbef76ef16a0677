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
    maskable: bool = True
    """Whether requests may have a mask."""
    strength: float | None = None
    """Default strength, from 0 (keep the source) to 1. None: there is no such argument."""
    guidance: str | None = "guidance_scale"
    guider: bool = False
    """Whether guidance is an attribute of the pipeline's guider, not an argument."""
    negative: bool = True
    unconditional: str = ""
    """Negative prompt without which the pipeline would not guide, if the request names none."""
    frames: bool = False
    """Whether it generates a video of ``num_frames``."""
    frame_step: int = 1
    """The number of frames must be 1 more than a multiple of this."""
    frame_rate: str | None = None
    """Name of the argument for frames per second, if the model is conditioned on it."""
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


def _image_to_video(pipeline: str, **settings: Any) -> PipelineFamily:
    return PipelineFamily(pipeline, image="image", images_max=1, frames=True, **settings)


_QWEN: Final[Mapping[str, Any]] = {"guidance": "true_cfg_scale", "unconditional": " "}
"""The guidance of Qwen-Image; its model card uses an empty text as the negative prompt."""


def _qwen(family: PipelineFamily) -> PipelineFamily:
    return replace(family, **_QWEN)


_EDITING: Final = ("image-edit", "image-relight", "image-restyle")
_FLUX2_EDIT: Final = PipelineFamily(
    "Flux2Pipeline", image="image", images_max=4, negative=False, maskable=False
)
_KLEIN_EDIT: Final = replace(
    _FLUX2_EDIT,
    pipeline="Flux2KleinPipeline",
    maskable=True,
    inpainting=_inpaint("Flux2KleinInpaintPipeline", negative=False),
)
_QWEN_EDIT: Final = PipelineFamily(
    "QwenImageEditPipeline",
    image="image",
    images_max=1,
    inpainting=replace(_qwen(_inpaint("QwenImageEditInpaintPipeline")), sized=False),
    **_QWEN,
)
_LTX2: Final[Mapping[str, Any]] = {"frames": True, "frame_step": 8, "frame_rate": "frame_rate"}
_HUNYUAN: Final[Mapping[str, Any]] = {
    "frame_step": 4,
    "guidance": "guidance_scale",
    "guider": True,
}
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
    "StableDiffusionInstructPix2PixPipeline": dict.fromkeys(_EDITING, _INSTRUCT_PIX2PIX),
    "FluxKontextPipeline": dict.fromkeys(_EDITING, replace(_KONTEXT, inpainting=_KONTEXT_INPAINT)),
    "WanPipeline": {"text-to-video": PipelineFamily("WanPipeline", frames=True, frame_step=4)},
    "WanImageToVideoPipeline": {
        "image-to-video": _image_to_video("WanImageToVideoPipeline", frame_step=4)
    },
    "LTXPipeline": {
        "text-to-video": PipelineFamily("LTXPipeline", frames=True, frame_step=8),
        "image-to-video": _image_to_video("LTXImageToVideoPipeline", frame_step=8),
    },
    "LTX2Pipeline": {
        "text-to-video": PipelineFamily("LTX2Pipeline", **_LTX2),
        "image-to-video": PipelineFamily(
            "LTX2ImageToVideoPipeline", image="image", images_max=1, **_LTX2
        ),
    },
    "CogVideoXPipeline": {
        "text-to-video": PipelineFamily("CogVideoXPipeline", frames=True, frame_step=4)
    },
    "CogVideoXImageToVideoPipeline": {
        "image-to-video": _image_to_video("CogVideoXImageToVideoPipeline", frame_step=4)
    },
    "HunyuanVideo15Pipeline": {
        "text-to-video": PipelineFamily("HunyuanVideo15Pipeline", frames=True, **_HUNYUAN)
    },
    "HunyuanVideo15ImageToVideoPipeline": {
        "image-to-video": _image_to_video(
            "HunyuanVideo15ImageToVideoPipeline", sized=False, **_HUNYUAN
        )
    },
    "MochiPipeline": {"text-to-video": PipelineFamily("MochiPipeline", frames=True, frame_step=6)},
    "QwenImagePipeline": {
        "text-to-image": PipelineFamily("QwenImagePipeline", **_QWEN),
        "image-to-image": _qwen(
            _img2img(
                "QwenImageImg2ImgPipeline", _qwen(_inpaint("QwenImageInpaintPipeline")), sized=True
            )
        ),
    },
    "QwenImageEditPipeline": dict.fromkeys(_EDITING, _QWEN_EDIT),
    "QwenImageEditPlusPipeline": dict.fromkeys(
        _EDITING,
        PipelineFamily(
            "QwenImageEditPlusPipeline", image="image", images_max=3, maskable=False, **_QWEN
        ),
    ),
    "ZImagePipeline": {
        "text-to-image": PipelineFamily("ZImagePipeline"),
        "image-to-image": _img2img(
            "ZImageImg2ImgPipeline", _inpaint("ZImageInpaintPipeline"), sized=True
        ),
    },
    "Flux2Pipeline": {
        "text-to-image": PipelineFamily("Flux2Pipeline", negative=False),
        **dict.fromkeys(_EDITING, _FLUX2_EDIT),
    },
    "Flux2KleinPipeline": {
        "text-to-image": PipelineFamily("Flux2KleinPipeline", negative=False),
        **dict.fromkeys(_EDITING, _KLEIN_EDIT),
    },
    "SanaPipeline": {
        "text-to-image": PipelineFamily("SanaPipeline", extra={"use_resolution_binning": False})
    },
    "PixArtSigmaPipeline": {
        "text-to-image": PipelineFamily(
            "PixArtSigmaPipeline",
            extra={"use_resolution_binning": False, "clean_caption": False},
        )
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
