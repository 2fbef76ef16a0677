"""Translates payloads of the request queue for models of the catalog. Pure.

GMI's models name their fields differently, so each of ours is accepted under all usual names. Any
other key is refused by name if the model runs here, and passed on unchanged if it is an upstream's.
Synonyms of fields that affect neither price nor hold are passed on, too, so that code written for
the upstream's model has the same effect as before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.api.gmi.audio_payloads import read_audio
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.errors import InvalidRequest, TollgateError, rename
from gateway.tasks.contracts import RATIO_TOLERANCE
from gateway.tasks.registry import Input, choose_task, parse, parse_unknown
from gateway.tasks.visual import ImageTask, VideoTask, choose_dialect_task

_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "images": (
        *("image", "images", "image_url", "image_urls", "input_image", "input_images"),
        *("source_image", "reference_images", "first_frame", "first_frame_image"),
    ),
    "video": ("video", "video_url", "input_video", "source_video"),
    "mask": ("mask", "mask_url", "mask_image"),
    "n": ("n", "num_images", "number_of_images"),
    "seconds": ("seconds", "duration", "length"),
    "steps": ("steps", "num_inference_steps", "num_steps"),
    "guidance": ("guidance", "guidance_scale", "cfg_scale"),
    "fps": ("fps", "frame_rate"),
    "scheduler": ("scheduler", "sampler"),
    "scale": ("scale", "scale_factor", "upscale_factor"),
    "format": ("format", "output_format"),
    "compression": ("compression", "output_compression"),
}
_COUNTED: Final = ("images", "video", "mask", "n", "seconds")
"""Fields that are stored as attachments or affect the hold, so every synonym is read."""
_UNSENT: Final = ("format", "compression", "previews", "scale")
"""Our fields that no adapter sends to an upstream; keys of these names are the model's own."""
_VISUAL: Final = tuple(
    task
    for task, kind in TASKS.items()
    if kind.makes in ("image", "video") and task != "talking-head"
)

_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})\s*[xX*]\s*([1-9][0-9]{0,4})")
_RATIO: Final = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class PayloadSubmission:
    """A submission's task and input, and the client's keys for our fields."""

    task: Task
    input: Input
    names: Mapping[str, str] = field(default_factory=dict)

    def rename(self, error: TollgateError) -> None:
        """Rename the parameter of an error to the client's key."""
        if error.param is not None:
            # Keys that are not ours are further parameters of our input.
            error.param = error.param.removeprefix("parameters.")
        rename(error, self.names)


def read_payload(entry: CatalogEntry, payload: Mapping[str, Any]) -> PayloadSubmission:
    """Translate a payload. Raise ``InvalidRequest`` with the client's key."""
    if not payload:
        raise InvalidRequest(
            "missing_required_parameter",
            f"payload is empty; GET models/{entry.name} lists its parameters.",
            param="payload",
        )
    if not is_visual(entry.task):
        if entry.upstream is not None:
            return PayloadSubmission(entry.task, parse_unknown(payload, prefix="payload"))
        makes_audio = TASKS[entry.task].makes == "audio"
        given, names = read_audio(entry, payload) if makes_audio else (payload, {})
        parsed = _parse(entry, given, names)
        return PayloadSubmission(choose_task(entry, parsed), parsed, names)
    reader = _PayloadReader(entry)
    for key, value in payload.items():
        if value is not None:
            reader.take(key, value)
    given = reader.given()
    names = reader.names
    value = _parse(entry, given, names)
    assert isinstance(value, ImageTask | VideoTask)
    return PayloadSubmission(
        choose_dialect_task(entry, value, makes=TASKS[entry.task].makes), value, names
    )


def _parse(entry: CatalogEntry, given: Mapping[str, Any], names: Mapping[str, str]) -> Input:
    try:
        return parse(entry.task, given, prefix="")
    except InvalidRequest as error:
        rename(error, names)
        raise


def is_visual(task: str) -> bool:
    """Whether a task has our common input for images and videos."""
    return task in _VISUAL


def spellings(entry: CatalogEntry) -> Mapping[str, str]:
    """Map every accepted key to our field."""
    schema: type[ImageTask | VideoTask] = (
        ImageTask if TASKS[entry.task].makes == "image" else VideoTask
    )
    local = entry.upstream is None
    found: dict[str, str] = {}
    for ours in schema.model_fields:
        if ours in ("image", "parameters") or (not local and _unsent(entry, ours)):
            continue
        known = _SPELLINGS.get(ours, (ours,))
        found |= dict.fromkeys(known if local or ours in _COUNTED else (ours,), ours)
    return found if local else {**found, **_upstream_names(entry, found)}


def _unsent(entry: CatalogEntry, ours: str) -> bool:
    return ours in _UNSENT and not (ours == "scale" and entry.task == "video-upscale")


def _upstream_names(entry: CatalogEntry, found: Mapping[str, str]) -> Mapping[str, str]:
    """Map the model's own names of our fields, from the entry's options, to ours."""
    fields = entry.options.get("fields")
    own = dict(fields) if isinstance(fields, dict) else {}
    own |= {name: entry.options.get(name) for name in ("images", "mask", "video", "scale")}
    ours = set(found.values())
    return {
        theirs: name for name, theirs in own.items() if isinstance(theirs, str) and name in ours
    }


class _PayloadReader:
    """Sorts the keys of a payload into our fields and the rest."""

    def __init__(self, entry: CatalogEntry) -> None:
        self._entry = entry
        self._spellings = spellings(entry)
        self._values: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}
        self._ratio: str | None = None
        self.names: dict[str, str] = {}

    def take(self, key: str, value: Any) -> None:
        ours = self._spellings.get(key)
        if key == "aspect_ratio" or (ours == "size" and _matches(_RATIO, value)):
            self._ratio = str(value)
            self.names["aspect_ratio"] = key
        elif ours is None:
            self._leave(key, value)
        elif ours in self.names:
            raise InvalidRequest(
                "invalid_value",
                f"{self.names[ours]} and {key} are synonyms; send one of them.",
                param=key,
            )
        else:
            self.names[ours] = key
            self._values[ours] = value

    def given(self) -> dict[str, Any]:
        """Return the input under our names."""
        values = self._values
        if isinstance(images := values.get("images"), str | dict):
            values["images"] = [images]
        if str(values.get("seed")) == "-1":
            del values["seed"]
        self._read_size()
        if self._ratio is not None:
            self._read_ratio(self._ratio)
        if not self._is_local:
            values["parameters"] = self._rest
        return values

    @property
    def _is_local(self) -> bool:
        return self._entry.upstream is None

    def _leave(self, key: str, value: Any) -> None:
        if key in _SPELLINGS["n"]:
            # A request generates and charges one video.
            if str(value) != "1":
                raise InvalidRequest(
                    "invalid_value",
                    f"{key} is {value!r}; a request to {self._entry.name} generates exactly one.",
                    param=key,
                )
        elif self._is_local:
            raise InvalidRequest(
                "unknown_parameter",
                f"Unknown parameter: {key}. {self._entry.name} accepts "
                f"{', '.join((*self._spellings, 'aspect_ratio'))}.",
                param=key,
            )
        else:
            self._rest[key] = value

    def _read_size(self) -> None:
        """Normalise the size; pass one in another form on to the upstream."""
        values = self._values
        given = values.get("size")
        if given is None or given == "auto":
            return
        if found := _matches(_SIZE, given):
            values["size"] = f"{found[1]}x{found[2]}"
        elif not self._is_local:
            self._rest[self.names["size"]] = values.pop("size")

    def _read_ratio(self, given: str) -> None:
        """Find the size for an aspect ratio."""
        entry, key = self._entry, self.names["aspect_ratio"]
        found = _matches(_RATIO, given)
        if found is None:
            if not self._is_local:
                self._rest[key] = given
            elif given != "auto":
                raise self._no_size(given)
            return
        ratio = int(found[1]) / int(found[2])
        values = self._values
        if "size" in values or ("width" in values and "height" in values):
            self._check_ratio(given, ratio)
        elif size := nearest(entry, ratio, resolution=values.get("resolution")):
            values["size"] = size
            self.names["size"] = key
        elif self._is_local or entry.sizes:
            raise self._no_size(given)
        else:
            self._rest[key] = given

    def _check_ratio(self, given: str, ratio: float) -> None:
        """Check that a size and an aspect ratio agree; the size is then used."""
        values = self._values
        size = values.get("size") or f"{values['width']}x{values['height']}"
        found = _matches(_SIZE, size)
        if found and not _is_near(int(found[1]) / int(found[2]), ratio):
            key = self.names["aspect_ratio"]
            raise InvalidRequest(
                "invalid_value",
                f"{key} is {given!r}, which contradicts the size {size}.",
                param=key,
            )

    def _no_size(self, given: str) -> InvalidRequest:
        key, entry = self.names["aspect_ratio"], self._entry
        can = f"its sizes are {', '.join(entry.sizes)}" if entry.sizes else "send a size"
        return InvalidRequest(
            "invalid_value",
            f"{key} is {given!r}, which {entry.name} does not support: {can}.",
            param=key,
        )


def nearest(entry: CatalogEntry, ratio: float, *, resolution: Any = None) -> str | None:
    """Return the listed size closest to a ratio, or None if none is within the tolerance."""
    fitting = []
    for size in entry.sizes:
        width, height = map(int, size.split("x"))
        if resolution is None or str(resolution).lower() == f"{min(width, height)}p":
            fitting.append((abs(math.log(width / height / ratio)), size))
    far, size = min(fitting, default=(math.inf, ""), key=lambda one: one[0])
    return size if far <= RATIO_TOLERANCE else None


def _is_near(one: float, other: float) -> bool:
    return abs(math.log(one / other)) <= RATIO_TOLERANCE


def _matches(pattern: re.Pattern[str], value: Any) -> re.Match[str] | None:
    return pattern.fullmatch(value) if isinstance(value, str) else None
