"""State of one request for images or a video: its generations, and the output so far.

A request for ``n`` images has ``n`` generations, each with its own seed; they are batched like
those of other requests. If one fails, the request lacks only that image.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from PIL import Image

from workers.contract.jobs import Failed, Job, Progress
from workers.contract.media import File, ImageInput, Medium, VideoInput
from workers.engines.cooperative_batching import PipelineRun
from workers.engines.diffusion import masks, previews, schedulers
from workers.engines.diffusion.adapters import NO_ADAPTERS, Selection
from workers.engines.diffusion.controls import ChosenControl
from workers.engines.diffusion.families import PipelineFamily
from workers.engines.diffusion.references import ChosenReference
from workers.engines.diffusion.upscaling import Upscaler
from workers.media import encode
from workers.media.pixels import Audio, Pixels, Weights
from workers.protocol.engine import CancelReason

VisualInput: TypeAlias = ImageInput | VideoInput
PREVIEW_TYPE: Final = "image/png"


@dataclass(slots=True, eq=False)
class Generation:
    """One image or video being generated."""

    index: int
    seed: int
    run: PipelineRun | None = None
    steps: int = 0
    done: int = 0
    previews: list[Pixels] = field(default_factory=list)
    """Previews not yet reported."""
    previews_taken: int = 0
    pixels: Pixels | None = None
    """The result, until it is encoded."""
    audio: Audio | None = None
    """Audio of a generated video."""
    media: list[tuple[Medium, File]] = field(default_factory=list)
    error: Failed | None = None

    @property
    def ended(self) -> bool:
        return self.pixels is not None or bool(self.media) or self.error is not None


@dataclass(slots=True, eq=False)
class Request:
    job: Job
    input: VisualInput
    family: PipelineFamily
    width: int
    height: int
    frames: int
    steps: int
    strength: float
    sources: tuple[Image.Image, ...]
    mask: Weights | None
    generations: list[Generation]
    adapters: Selection = NO_ADAPTERS
    control: ChosenControl | None = None
    reference: ChosenReference | None = None
    cancelled: CancelReason | None = None
    started_s: float = 0.0
    reported: int = -1

    @property
    def done(self) -> int:
        return sum(one.done for one in self.generations)

    @property
    def ended(self) -> bool:
        return all(one.ended for one in self.generations)

    def progress(self) -> Progress | None:
        """Return the progress if it has changed since the last report."""
        done = self.done
        if done == self.reported or not done:
            return None
        self.reported = done
        total = sum(one.steps or self.steps for one in self.generations)
        remaining_s = (time.monotonic() - self.started_s) / done * max(0, total - done)
        return Progress(done, max(done, total), round(remaining_s * 1000))


class GenerationError(Exception):
    """A generation without a result. The message is a sentence for the client."""


def make_pipeline_call(
    request: Request,
    generation: Generation,
    pipeline: Any,
    guidance: float | None,
    upscaler: Upscaler | None = None,
    *,
    fps: int = 8,
) -> Callable[[], Pixels]:
    """Return the function that a generation's run executes: a call of the pipeline.

    It returns an image ``(H, W, 3)`` or the frames of a video ``(T, H, W, 3)``.
    """
    input, family = request.input, request.family
    arguments: dict[str, Any] = {
        "prompt": input.prompt,
        "num_inference_steps": request.steps,
        "generator": torch.Generator().manual_seed(generation.seed),
        "output_type": "np",
        **family.extra,
    }
    if family.negative and (negative := input.negative_prompt or family.unconditional):
        arguments["negative_prompt"] = negative
    if family.guidance is not None and guidance is not None:
        if family.guider:
            setattr(pipeline.guider, family.guidance, guidance)
        else:
            arguments[family.guidance] = guidance
    if family.image is not None and request.sources:
        several = family.images_max > 1
        arguments[family.image] = list(request.sources) if several else request.sources[0]
    if request.control is not None:
        arguments |= request.control.arguments(family.pipeline)
    if request.reference is not None:
        arguments["ip_adapter_image"] = request.reference.image
    if family.mask is not None and request.mask is not None:
        arguments[family.mask] = masks.as_image(request.mask)
    if family.strength is not None:
        arguments["strength"] = request.strength
    if family.area is not None:
        arguments[family.area] = request.width * request.height
    if family.sized:
        arguments |= {"width": request.width, "height": request.height}
    if family.frames:
        if family.frame_rate is not None:
            arguments[family.frame_rate] = fps
        step = family.frame_step
        arguments["num_frames"] = -(-(request.frames - 1) // step) * step + 1

    def call() -> Pixels:
        blend = None
        if request.mask is not None and family.mask is None:
            blend = masks.Blend(pipeline, request.sources[0], request.mask, generation.seed)
        _observe_steps(pipeline, generation, request, blend)
        result = pipeline(**arguments)
        flagged = getattr(result, "nsfw_content_detected", None)
        if flagged and flagged[0]:
            raise GenerationError("The result was blocked by the model's safety checker.")
        if family.frames:
            generation.audio = _audio(pipeline, result)
            frames = to_pixels(np.asarray(result.frames[0]))[: request.frames]
            return np.stack(
                [_upscale(_fit(frame, request), upscaler, input.scale) for frame in frames]
            )
        pixels = _fit(to_pixels(np.asarray(result.images[0])), request)
        pixels = _keep_outside(pixels, request)
        return _upscale(pixels, upscaler, input.scale)

    return call


def _audio(pipeline: Any, result: Any) -> Audio | None:
    """Return the audio that some pipelines generate with a video, ``(channels, N)``."""
    if (generated := getattr(result, "audio", None)) is None:
        return None
    samples: np.ndarray = np.asarray(generated[0].float().cpu().clamp(-1, 1), dtype=np.float32)
    if not np.isfinite(samples).all():
        raise GenerationError("The model produced non-finite values.")
    return Audio(np.atleast_2d(samples), int(pipeline.vocoder.config.output_sampling_rate))


def _fit(pixels: Pixels, request: Request) -> Pixels:
    """Resize the result of a pipeline that chooses its own size."""
    if request.family.sized or pixels.shape[:2] == (request.height, request.width):
        return pixels
    return np.asarray(crop_to_fit(Image.fromarray(pixels), request.width, request.height))


def _keep_outside(pixels: Pixels, request: Request) -> Pixels:
    if request.mask is None:
        return pixels
    return masks.keep_outside(pixels, request.sources[0], request.mask)


def _observe_steps(
    pipeline: Any, generation: Generation, request: Request, blend: masks.Blend | None
) -> None:
    """Extend the scheduler's step to count steps, apply the mask and take previews.

    By a class, not an attribute: pipelines that denoise sound as well copy the scheduler for it.
    """
    scheduler, previews_max = pipeline.scheduler, request.input.previews
    kind = type(scheduler)
    generation.steps = generation.done = 0

    @functools.wraps(kind.step)  # pipelines inspect the signature
    def observed_step(own: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if own is not scheduler:
            return kind.step(own, output, *args, **kwargs)
        timestep, noisy = schedulers.step_inputs(scheduler, args)
        if generation.done == 0:
            begin = getattr(scheduler, "begin_index", None) or 0
            total = getattr(pipeline, "_num_timesteps", None)
            generation.steps = total or len(scheduler.timesteps) - begin
        stepped = kind.step(scheduler, output, *args, **kwargs)
        generation.done += 1
        due = generation.steps * (generation.previews_taken + 1) // (previews_max + 1)
        if generation.previews_taken < previews_max and due <= generation.done < generation.steps:
            generation.previews_taken += 1
            clean = schedulers.predict_clean(scheduler, output, noisy, timestep)
            generation.previews.append(_decode_preview(pipeline, clean, request))
        if blend is None:
            return stepped
        return (blend.keep(stepped[0], timestep), *stepped[1:])

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": observed_step})


def _decode_preview(pipeline: Any, latents: torch.Tensor, request: Request) -> Pixels:
    """Decode intermediate latents: ``(H, W, 3)``; for a video, a thumbnail of one frame."""
    height, width = request.height, request.width
    if request.family.frames:
        frame = previews.decode_middle_frame(pipeline, latents, height, width)
        return encode.thumbnail(to_pixels(frame))
    return _keep_outside(
        to_pixels(previews.decode_image(pipeline, latents, height, width)), request
    )


def _upscale(pixels: Pixels, upscaler: Upscaler | None, scale: int | None) -> Pixels:
    if upscaler is None or scale is None or scale == 1:
        return pixels
    return upscaler.upscale(pixels, scale)


def to_pixels(array: Any) -> Pixels:
    """Convert values from 0 to 1 to bytes. Raise ``GenerationError`` if any is not finite."""
    if not np.isfinite(array).all():
        raise GenerationError("The model produced non-finite values.")
    pixels: Pixels = (np.clip(array, 0.0, 1.0) * 255).round().astype(np.uint8)
    return pixels


def crop_to_fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """Crop an image around its centre to an aspect ratio, and resize it."""
    scale = max(width / image.width, height / image.height)
    cut_w, cut_h = width / scale, height / scale
    left, top = (image.width - cut_w) / 2, (image.height - cut_h) / 2
    box = (left, top, left + cut_w, top + cut_h)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box)


def image_file(pixels: Pixels, input: ImageInput, origin: encode.Origin) -> tuple[str, File]:
    content_type = f"image/{input.format}"
    return content_type, File(
        content_type, encode.image(pixels, input.format, quality=input.compression, origin=origin)
    )


def video_files(
    frames: Pixels,
    fps: int,
    input: VideoInput,
    origin: encode.Origin,
    audio: Audio | None = None,
) -> list[tuple[Medium, File]]:
    """Encode a video, its thumbnail and its spritesheet."""
    count, height, width, _ = frames.shape
    duration_ms = round(count * 1000 / fps)
    data = encode.video(frames, Fraction(fps), input.format, origin=origin, audio=audio)
    content_type = "video/mp4" if input.format == "mp4" else "image/webp"
    first = Medium(
        "video",
        content_type=content_type,
        width=width,
        height=height,
        duration_ms=duration_ms,
        fps=fps,
        seed=input.seed,
    )
    media = [(first, File(content_type, data))]
    stills = (
        ("thumbnail", encode.thumbnail(frames[0])),
        ("spritesheet", encode.spritesheet(list(frames))),
    )
    for role, still in stills:
        medium = Medium(
            "image",
            role=role,  # type: ignore[arg-type]
            content_type="image/webp",
            width=still.shape[1],
            height=still.shape[0],
        )
        media.append((medium, File("image/webp", encode.image(still, "webp"))))
    return media
