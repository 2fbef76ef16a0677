"""Inputs of the image and video tasks: their schemas, checks and maximum usage. Pure.

Images and videos share most of their fields. If an entry lists values (sizes, qualities,
schedulers), only those are accepted. If it lists none, a model that runs here accepts no names, and
a model of an upstream accepts what the schema allows. Names and defaults are resolved here, so that
engines read numbers and the hold covers what will be generated.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from pydantic import Field, StringConstraints

from gateway.catalog.market.contract import contract_of, longest_seconds
from gateway.catalog.schema import (
    FPS_MAX,
    GUIDANCE_MAX,
    SCALE_MAX,
    SECONDS_MAX,
    SIDE_MAX,
    SOURCES_MAX,
    CatalogEntry,
    Quality,
)
from gateway.catalog.tasks import TASKS, Modality, Task
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField
from gateway.tasks.adapters import Adapters, choose_adapters
from gateway.tasks.guides import Guides, choose_guides
from gateway.tasks.prepared import Prepared, gpu_us_max, over
from workers.contract.jobs import Usage
from workers.contract.media import ImageFormat, ImageInput, VideoFormat, VideoInput

PROMPT_MAX: Final = 32_000
STEPS_MAX: Final = 1000
SEED_MAX: Final = 2**53
"""Exclusive upper bound: larger integers are not exact in all JSON parsers."""
PREVIEWS_MAX: Final = 3
STRENGTH_MAX: Final = 10.0

_Prompt: TypeAlias = Annotated[str, StringConstraints(max_length=PROMPT_MAX)]
_Side: TypeAlias = Annotated[int, Field(ge=1, le=SIDE_MAX)]
_Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=40)]
_Strength: TypeAlias = Annotated[float, Field(ge=0, le=STRENGTH_MAX)]
SizeName: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$")
]


class VisualTask(StrictModel):
    """Fields common to images and videos."""

    prompt: _Prompt | None = None
    negative_prompt: _Prompt | None = None
    image: SourceField | None = None
    images: Annotated[list[SourceField], Field(max_length=SOURCES_MAX)] | None = None
    size: SizeName | None = None
    width: _Side | None = None
    height: _Side | None = None
    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)] | None = None
    guidance: Annotated[float, Field(ge=0, le=GUIDANCE_MAX)] | None = None
    scheduler: _Name | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_MAX)] | None = None
    quality: _Name | None = None
    resolution: _Name | None = None
    scale: Annotated[int, Field(ge=1, le=SCALE_MAX)] | None = None
    previews: Annotated[int, Field(ge=0, le=PREVIEWS_MAX)] | None = None
    adapters: Adapters | None = None
    parameters: dict[str, Any] | None = None


class ImageTask(VisualTask):
    """Images to generate."""

    mask: SourceField | None = None
    n: Annotated[int, Field(ge=1, le=100)] | None = None
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    control: _Name | None = None
    control_image: SourceField | None = None
    control_strength: _Strength | None = None
    reference_image: SourceField | None = None
    reference_strength: _Strength | None = None
    format: ImageFormat | None = None
    compression: Annotated[int, Field(ge=1, le=100)] | None = None


class VideoTask(VisualTask):
    """A video to generate."""

    video: SourceField | None = None
    seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] | None = None
    fps: Annotated[int, Field(ge=1, le=FPS_MAX)] | None = None
    format: VideoFormat | None = None


def choose_dialect_task(
    entry: CatalogEntry, value: VisualTask, *, makes: Modality, prefer: Collection[Task] = ()
) -> Task:
    """Choose the task for an endpoint that serves one kind of output.

    Raise ``InvalidRequest`` if the model produces another kind.
    """
    task = choose_visual_task(entry, value, prefer=prefer)
    # These endpoints have no field for the audio that such a task needs.
    needs_audio = entry.upstream is None and "audio" in TASKS[task].reads
    if TASKS[task].makes != makes or needs_audio:
        raise InvalidRequest(
            "task_not_supported", f"{entry.name} does {entry.task}, not {makes}s.", param="model"
        )
    return task


def choose_visual_task(
    entry: CatalogEntry, value: VisualTask, *, prefer: Collection[Task] = ()
) -> Task:
    """Choose the task of an input by its attachments.

    If none fits, return the entry's own, whose check reports why.
    """
    mask = isinstance(value, ImageTask) and value.mask is not None
    video = isinstance(value, VideoTask) and value.video is not None
    images = bool(value.image or value.images)
    makes = TASKS[entry.task].makes
    fitting = [
        task
        for task in (entry.task, *entry.also)
        if TASKS[task].makes == makes
        and ("image" in TASKS[task].reads) == images
        and ("video" in TASKS[task].reads) == video
    ]
    several = len(value.images or ()) > 1

    def is_meant(task: Task) -> bool:
        if mask:
            return task == "image-edit"
        if prefer:
            return task in prefer
        return several and TASKS[task].images_min > 1

    meant = [task for task in fitting if is_meant(task)]
    return next(iter((*meant, *fitting, entry.task)))


def prepare_image(entry: CatalogEntry, task: Task, value: ImageTask, *, prefix: str) -> Prepared:
    """Check an image task against a catalog entry and bound its usage."""
    checked = _TaskInput(entry, task, value, prefix)
    n, most = value.n or 1, entry.limits.images or 1
    if n > most:
        raise over(f"{prefix}n", n, f"{entry.name} makes at most {most}")
    guides = Guides(
        value.control,
        value.control_image,
        value.control_strength,
        value.reference_image,
        value.reference_strength,
    )
    guided, conditions = choose_guides(entry, guides, prefix)
    sources = (*checked.sources(value.mask), *guides.sources(prefix))
    if value.strength is not None and "image" not in checked.reads:
        raise checked.refuse("strength", "strength requires a source image; send an image.")
    common, attributes = checked.common()
    default = entry.default_parameters
    strength = value.strength if value.strength is not None else default.strength
    image = ImageInput(
        **common,
        **guided,
        mask=value.mask is not None,
        n=n,
        strength=strength if "image" in checked.reads else None,
        quality=checked.quality_name or "",
        scale=checked.scale() or 1,
        format=value.format or "png",
        compression=value.compression or ImageInput().compression,
        previews=value.previews or 0,
    )
    return Prepared(
        input=msgspec.to_builtins(image),
        limits=Usage(
            requests=1,
            images=n,
            steps=n * (image.steps or entry.limits.steps or 0),
            gpu_us=gpu_us_max(entry.limits),
            attributes=attributes | conditions,
        ),
        sources=sources,
    )


def prepare_video(entry: CatalogEntry, task: Task, value: VideoTask, *, prefix: str) -> Prepared:
    """Check a video task against a catalog entry and bound its usage."""
    checked, limits = _TaskInput(entry, task, value, prefix), entry.limits
    if value.seconds is not None and limits.seconds and value.seconds > limits.seconds:
        most = f"{entry.name} makes at most {limits.seconds} s"
        raise over(f"{prefix}seconds", value.seconds, most)
    sources = checked.sources(None)
    common, attributes = checked.common()
    seconds = value.seconds or entry.default_parameters.seconds
    video = VideoInput(
        **common,
        video=value.video is not None,
        duration_ms=max(1, round(seconds * 1000)) if seconds else None,
        fps=checked.number("fps", entry.default_parameters.fps),
        scale=checked.scale(),
        format=value.format or "mp4",
        previews=value.previews or 0,
    )
    return Prepared(
        input=msgspec.to_builtins(video),
        limits=Usage(
            requests=1,
            video_ms=video.duration_ms or round(longest_seconds(entry) * 1000),
            steps=video.steps or limits.steps or 0,
            gpu_us=gpu_us_max(limits),
            attributes=attributes,
        ),
        sources=sources,
    )


@dataclass(frozen=True, slots=True)
class _TaskInput:
    """An input and the entry that it is checked against."""

    entry: CatalogEntry
    task: Task
    value: VisualTask
    prefix: str

    @property
    def reads(self) -> tuple[Modality, ...]:
        return TASKS[self.task].reads

    @property
    def local(self) -> bool:
        return self.entry.upstream is None

    @property
    def quality_name(self) -> str | None:
        """The requested quality, or the entry's default; None: left to the model."""
        requested = self.value.quality
        return (
            requested if requested not in (None, "auto") else self.entry.default_parameters.quality
        )

    def refuse(self, field: str, message: str, code: str = "invalid_value") -> InvalidRequest:
        return InvalidRequest(code, message, param=f"{self.prefix}{field}")

    def common(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the fields common to images and videos, and the attributes that prices use."""
        value, default = self.value, self.entry.default_parameters
        self._check_prompt()
        size, resolution = self._size(), self._resolution()
        quality = self._quality()
        parameters = dict(value.parameters or {})
        if parameters and self.local:
            raise self.refuse(
                f"parameters.{min(parameters)}",
                f"{self.entry.name} runs here and accepts only the task's own parameters; "
                "parameters is for models of an upstream.",
                "unsupported_parameter",
            )
        if resolution and not self.local:
            parameters.setdefault("resolution", resolution)
        if self.quality_name and not self.local and isinstance(value, VideoTask):
            # Our video input has no quality.
            parameters.setdefault("quality", self.quality_name)
        if size is None and resolution and self.local:
            size = self._size_of(resolution)
        fields = {
            "prompt": value.prompt or "",
            "negative_prompt": value.negative_prompt or "",
            "images": len(self._images()),
            "width": size[0] if size else None,
            "height": size[1] if size else None,
            "steps": self.number("steps", quality.steps or default.steps),
            "guidance": self.number(
                "guidance", quality.guidance if quality.guidance is not None else default.guidance
            ),
            "scheduler": self._scheduler(quality.scheduler or default.scheduler),
            "seed": self._seed(),
            "parameters": parameters,
            "adapters": choose_adapters(self.entry, value.adapters or {}, self.prefix),
        }
        attributes = {
            "size": f"{size[0]}x{size[1]}" if size else None,
            "quality": self.quality_name,
            "resolution": resolution,
        }
        return fields, {name: given for name, given in attributes.items() if given}

    def number(self, field: str, default: float | None) -> Any:
        """Return a number that the entry may limit, or its default."""
        given, most = getattr(self.value, field), getattr(self.entry.limits, field)
        if given is not None and most is not None and given > most:
            raise over(f"{self.prefix}{field}", given, f"{self.entry.name} takes at most {most}")
        return given if given is not None else default

    def scale(self) -> int | None:
        given, most = self.value.scale, self.entry.limits.scale
        if most is None:
            # The upscaler's engine has its own maximum, and refuses more without a charge.
            most = 1 if self.local and not self.task.endswith("-upscale") else SCALE_MAX
        if given is not None and given > most:
            raise over(f"{self.prefix}scale", given, f"{self.entry.name} upscales {most} times")
        return given

    def sources(self, mask: Any) -> tuple[Source, ...]:
        """Return the attachments in the order of the worker contract: images, mask, video."""
        images = self._images()
        reads_images = "image" in self.reads
        if images and not reads_images:
            raise self.refuse(images[0][0], f"{self.entry.name} reads no images in {self.task}.")
        if reads_images and not images:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{self.task} needs an image; send {self.prefix}image.",
                param=f"{self.prefix}image",
            )
        fewest = TASKS[self.task].images_min
        if self.local and 0 < len(images) < fewest:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{self.task} needs {fewest} images; send them in {self.prefix}images.",
                param=f"{self.prefix}images",
            )
        most = self.entry.limits.sources or (fewest if self.local else SOURCES_MAX)
        if len(images) > most:
            raise over(
                f"{self.prefix}images", len(images), f"{self.entry.name} reads at most {most}"
            )
        found = [Source("image", given, f"{self.prefix}{field}") for field, given in images]
        if mask is not None:
            if not reads_images:
                raise self.refuse("mask", "A mask requires an image; send one.")
            if self.task == "image-upscale":
                raise self.refuse("mask", "An upscaler takes no mask; leave it out.")
            found.append(Source("image", mask, f"{self.prefix}mask"))
        found.extend(self._videos())
        return tuple(found)

    def _videos(self) -> Iterator[Source]:
        video = self.value.video if isinstance(self.value, VideoTask) else None
        if video is None and "video" in self.reads:
            raise InvalidRequest(
                "missing_required_parameter",
                f"{self.task} needs a video; send {self.prefix}video.",
                param=f"{self.prefix}video",
            )
        if video is not None:
            if "video" not in self.reads:
                raise self.refuse("video", f"{self.entry.name} reads no videos in {self.task}.")
            yield Source("video", video, f"{self.prefix}video")

    def _images(self) -> list[tuple[str, Any]]:
        value = self.value
        if value.image is not None and value.images:
            raise self.refuse("images", "Send either image or images.")
        if value.image is not None:
            return [("image", value.image)]
        return [(f"images.{place}", given) for place, given in enumerate(value.images or ())]

    def _check_prompt(self) -> None:
        prompt, most = self.value.prompt or "", self.entry.limits.characters
        if not prompt.strip() and self.reads == ("text",):
            raise InvalidRequest(
                "missing_required_parameter",
                f"{self.task} needs a text; send {self.prefix}prompt.",
                param=f"{self.prefix}prompt",
            )
        if most and len(prompt) > most:
            raise over(
                f"{self.prefix}prompt", len(prompt), f"{self.entry.name} reads {most} characters"
            )

    def _quality(self) -> Quality:
        name, known = self.quality_name, self.entry.qualities
        if name is None:
            return Quality()
        self._check_listed("quality", name, known)
        return known.get(name, Quality())

    def _seed(self) -> int:
        if self.value.seed is not None:
            return self.value.seed
        contract = contract_of(self.entry)
        if contract is not None and contract.find("seed") is None:
            return 0
        # Chosen here and not by the worker, so that a second attempt repeats the first.
        return secrets.randbits(32)

    def _scheduler(self, default: str | None) -> str | None:
        if self.value.scheduler is None:
            return default
        self._check_listed("scheduler", self.value.scheduler, self.entry.schedulers)
        return self.value.scheduler

    def _resolution(self) -> str | None:
        """Return the requested resolution, or the listed one of the requested size."""
        requested = self.value.resolution
        if requested is not None:
            self._check_listed("resolution", requested, self.entry.resolutions)
            return requested
        size = self._size()
        by_side = f"{min(size)}p" if size else None
        return by_side if by_side in self.entry.resolutions else None

    def _check_listed(self, field: str, name: str, known: Collection[str]) -> None:
        if name in known or (not known and not self.local):
            return
        accepted = f"accepts {', '.join(known)}" if known else "does not support this parameter"
        raise self.refuse(field, f"{field} is {name!r}, but {self.entry.name} {accepted}.")

    def _size(self) -> tuple[int, int] | None:
        """Return the requested size, or the entry's default; None: left to the model."""
        value, sizes = self.value, self.entry.sizes
        if (value.width is None) != (value.height is None):
            missing = "height" if value.height is None else "width"
            raise InvalidRequest(
                "missing_required_parameter",
                "width and height must be sent together.",
                param=f"{self.prefix}{missing}",
            )
        requested = None if value.size in (None, "auto") else _pair(str(value.size))
        if value.width is not None and value.height is not None:
            if requested is not None and requested != (value.width, value.height):
                raise self.refuse("size", "size differs from width and height; send one of them.")
            requested = (value.width, value.height)
        if requested is None:
            # Without a source image, which would determine the size.
            plain = self.reads == ("text",) and value.resolution is None
            return _pair(sizes[0]) if sizes and plain else None
        self._check_size(*requested)
        return requested

    def _check_size(self, width: int, height: int) -> None:
        limits, sizes = self.entry.limits, self.entry.sizes
        given, name = f"{width}x{height}", self.entry.name
        field = "size" if self.value.size not in (None, "auto") else "width"
        if sizes and given not in sizes:
            raise self.refuse(
                field,
                f"size is {given}, but {name} supports {', '.join(sizes)}."
                f"{_enlarged(given, sizes, limits.scale or 1)}",
            )
        if limits.side and max(width, height) > limits.side:
            raise self.refuse(
                field, f"size is {given}, but a side of {name} can be at most {limits.side} pixels."
            )
        if limits.pixels and width * height > limits.pixels:
            raise self.refuse(
                field, f"size is {given}, but {name} generates at most {limits.pixels} pixels."
            )
        if limits.side_step and (width % limits.side_step or height % limits.side_step):
            raise self.refuse(
                field, f"size is {given}, but sides must be multiples of {limits.side_step}."
            )
        if max(width, height) > SIDE_MAX:
            raise self.refuse(field, f"size is {given}; a side can be at most {SIDE_MAX} pixels.")

    def _size_of(self, resolution: str) -> tuple[int, int]:
        """Return the first listed size of a resolution, for a model that accepts sizes only."""
        for size in map(_pair, self.entry.sizes):
            if f"{min(size)}p" == resolution:
                return size
        raise self.refuse(
            "resolution", f"{self.entry.name} has no {resolution} size; send size instead."
        )


def _enlarged(given: str, sizes: Collection[str], most: int) -> str:
    """Say how a model that enlarges its results comes to a size, or near it."""
    if most == 1:
        return ""
    for size in sizes:
        (width, height), (wanted, high) = _pair(size), _pair(given)
        scale = wanted // width
        if 1 < scale <= most and (width * scale, height * scale) == (wanted, high):
            return f" Send size {size} and scale {scale} to get {given}."
    return f" A scale of at most {most} enlarges them."


def _pair(size: str) -> tuple[int, int]:
    width, _, height = size.partition("x")
    return int(width), int(height)
