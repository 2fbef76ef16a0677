"""Reads a job of the diffusion engine: checks its input, and decodes and fits its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from workers.contract.jobs import Job
from workers.contract.media import ImageInput, VideoInput
from workers.contract.models import ModelSpec
from workers.engines.diffusion import adapters, controls, masks, references, sizes
from workers.engines.diffusion.families import PipelineFamily
from workers.engines.diffusion.loading import LoadedCheckpoint
from workers.engines.diffusion.options import Options
from workers.engines.diffusion.request import Generation, Request, VisualInput, crop_to_fit
from workers.engines.torch_engine import InputError, read_input, reading
from workers.media.decode import read_image, read_mask
from workers.media.pixels import Weights

VIDEO_TASKS: Final = ("text-to-video", "image-to-video")
SOURCE_PIXELS_MAX: Final = 32_000_000


def frame_rate(input: VisualInput, options: Options) -> int:
    return (input.fps if isinstance(input, VideoInput) else None) or options.fps


@dataclass(frozen=True, slots=True)
class InputReader:
    """Reads jobs of one model. ``scale_max``: that of its upscaler, if it has one."""

    spec: ModelSpec
    options: Options
    model: LoadedCheckpoint
    scale_max: int | None

    def read(self, job: Job, files: Sequence[bytes]) -> Request:
        """Raise ``InputError`` if the model cannot process the job."""
        family = self.model.families.get(job.task)
        if family is None:
            raise InputError("invalid_input", f"{self.spec.name} does not support {job.task}.")
        input = _read_input(job)
        has_mask = isinstance(input, ImageInput) and input.mask
        if has_mask and family.inpainting is not None:
            family = family.inpainting
        self._check(input, family)
        images = [_picture(data, "image") for data in files[: input.images]]
        width, height = self._size(input)
        sources = tuple(crop_to_fit(one, width, height) for one in images)
        mask = None
        if has_mask:
            mask = _mask(files[input.images], images[0], (width, height))
        guides = iter(files[input.images + bool(has_mask) :])
        control = self._control(input, family, guides, (width, height))
        reference = self._reference(input, family, guides, control)
        count = input.n if isinstance(input, ImageInput) else 1
        return Request(
            job=job,
            input=input,
            family=family,
            width=width,
            height=height,
            frames=self._frames(input) if family.frames else 1,
            steps=input.steps or self.options.steps,
            strength=self._strength(input, family),
            sources=sources,
            mask=mask,
            adapters=adapters.select(input.adapters, self.options.adapters),
            control=control,
            reference=reference,
            generations=[Generation(index, input.seed + index) for index in range(count)],
        )

    def _control(
        self,
        input: VisualInput,
        family: PipelineFamily,
        files: Iterator[bytes],
        size: tuple[int, int],
    ) -> controls.ChosenControl | None:
        if not isinstance(input, ImageInput) or not input.control:
            return None
        return controls.choose(
            input.control,
            input.control_strength,
            self.options.controls,
            family.pipeline,
            lambda: crop_to_fit(_picture(next(files), "control_image"), *size),
        )

    def _reference(
        self,
        input: VisualInput,
        family: PipelineFamily,
        files: Iterator[bytes],
        control: controls.ChosenControl | None,
    ) -> references.ChosenReference | None:
        if not isinstance(input, ImageInput) or not input.reference:
            return None
        model, name = self.model, family.pipeline
        return references.choose(
            input.reference_strength,
            self.options.reference,
            model.pipelines[name] if control is None else model.controlled[name, control.name],
            lambda: _picture(next(files), "reference_image"),
            beside="" if control is None else " beside a control picture in this task",
        )

    def _check(self, input: VisualInput, family: PipelineFamily) -> None:
        """Raise ``InputError`` for a parameter that the pipeline would otherwise ignore."""
        name = self.spec.name
        if input.negative_prompt and not family.negative:
            raise InputError(
                "unsupported_parameter",
                f"{name} does not support negative prompts.",
                "negative_prompt",
            )
        if input.guidance is not None and family.guidance is None:
            raise InputError(
                "unsupported_parameter", f"{name} does not support guidance.", "guidance"
            )
        if (input.images and family.image is None) or input.images > family.images_max:
            raise InputError(
                "invalid_input", f"{name} accepts at most {family.images_max} images.", "image"
            )
        has_mask = isinstance(input, ImageInput) and input.mask
        if has_mask and not input.images:
            raise InputError("invalid_input", "A mask needs an image; send one.", "mask")
        if has_mask and not family.maskable:
            raise InputError("unsupported_parameter", f"{name} does not support masks.", "mask")
        if family.mask is not None and not has_mask:
            raise InputError("invalid_input", f"{name} edits the area of a mask; send one.", "mask")
        if not input.images and (family.strength is not None or not family.sized):
            raise InputError("invalid_input", "This task needs an image; send one.", "image")
        scale = input.scale or 1
        if scale > 1 and self.scale_max is None:
            raise InputError("unsupported_parameter", f"{name} has no upscaler.", "scale")
        if self.scale_max is not None and scale > self.scale_max:
            raise InputError(
                "invalid_input",
                f"scale is {scale}; {name} supports at most {self.scale_max}.",
                "scale",
            )
        if input.parameters:
            field = min(input.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)

    def _strength(self, input: VisualInput, family: PipelineFamily) -> float:
        """Return the strength. Raise ``InputError`` if it leaves no step."""
        requested = input.strength if isinstance(input, ImageInput) else None
        default = self.options.strength if self.options.strength is not None else family.strength
        strength = (default or 0.0) if requested is None else requested
        steps = input.steps or self.options.steps
        if family.strength is not None and int(steps * strength) < 1:
            raise InputError(
                "invalid_input",
                f"strength is {strength}; with {steps} steps it must be at least {1 / steps:.2g}.",
                "strength",
            )
        return strength

    def _size(self, input: VisualInput) -> tuple[int, int]:
        """Return width and height, requested or native. Raise ``InputError`` if not supported."""
        pipeline = next(iter(self.model.pipelines.values()))
        side = sizes.native_side(pipeline)
        width, height = input.width or side, input.height or side
        multiple = sizes.side_multiple(pipeline)
        if width % multiple or height % multiple:
            raise InputError(
                "invalid_input",
                f"size is {width}x{height}; {self.spec.name} needs multiples of {multiple}.",
                "size",
            )
        return width, height

    def _frames(self, input: VisualInput) -> int:
        assert isinstance(input, VideoInput)
        fps = frame_rate(input, self.options)
        if input.duration_ms is None:
            return self.options.frames or 2 * fps + 1
        return max(1, round(input.duration_ms * fps / 1000))


def _read_input(job: Job) -> VisualInput:
    kind: type[VisualInput] = VideoInput if job.task in VIDEO_TASKS else ImageInput
    return read_input(job, kind)


def _picture(data: bytes, param: str) -> Image.Image:
    """Decode an image. Raise ``InputError``, which names ``param``."""
    with reading(param):
        return Image.fromarray(read_image(data, pixels_max=SOURCE_PIXELS_MAX))


def _mask(data: bytes, image: Image.Image, size: tuple[int, int]) -> Weights:
    """Decode a mask, cropped and resized like its image. Raise ``InputError``."""
    with reading("mask"):
        found = read_mask(data, image.size, pixels_max=SOURCE_PIXELS_MAX)
    fitted = crop_to_fit(masks.as_image(found), *size)
    mask = np.asarray(fitted, dtype=np.float32) / np.float32(255)
    if not mask.any():
        raise InputError(
            "invalid_input",
            "The mask protects the whole image; the area to edit must be transparent or white.",
            "mask",
        )
    return mask
