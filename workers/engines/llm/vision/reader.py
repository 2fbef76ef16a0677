"""Reads the pictures of clients: decoding, the size in which the model sees them, and patches.

The size is that of the library's image processor, within bounds that are known before a picture is:
``limits.source_tokens``, by which the gateway prices it, covers its tokens and those that the chat
template writes around them. A larger picture is scaled down.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from workers.contract.jobs import ChatMessage, Failed
from workers.contract.models import ModelSpec
from workers.engines.llm.options import Options, reads_pictures
from workers.engines.llm.vision.pictures import Picture, PicturePrompt
from workers.engines.llm.vision.tower import has_vision
from workers.engines.llm.vocabulary import Vocabulary
from workers.media.decode import read_image
from workers.media.pixels import MediaError

_RATIO_MAX: Final = 200
"""Largest ratio of the sides that the library's processor scales."""
_CONFIGURATIONS: Final = ("preprocessor_config.json", "processor_config.json")
Pictures: TypeAlias = tuple[Picture, ...] | Failed
"""The attachments of a conversation, or why one cannot be read."""


class PictureReader:
    """``mark``: the token that a chat template writes for a picture; ``around``: how many it writes
    beside it. Raise ``ValueError`` if no picture fits into the limits."""

    def __init__(
        self, path: Path, spec: ModelSpec, options: Options, vision: Any, *, mark: int, around: int
    ) -> None:
        self.mark = mark
        self.tokens_max = _source_tokens(spec) - around
        """Maximum tokens of a picture, without those around it."""
        self._dtype = options.torch_dtype
        self._processor = _read_processor(path, vision)
        self._merge = int(vision.spatial_merge_size)
        pixels = (int(vision.patch_size) * self._merge) ** 2
        size = self._processor.size
        most = self.tokens_max * pixels
        bound = options.picture_pixels_max or min(int(size["longest_edge"]), most)
        # Sides are rounded up to whole tokens, which at most quadruples the least.
        least = options.picture_pixels_min or min(int(size["shortest_edge"]), bound // 4)
        if self.tokens_max < 1 or bound > most:
            raise ValueError(
                f"limits.source_tokens is {_source_tokens(spec)}, but a picture of "
                f"{max(bound, pixels)} pixels takes {math.ceil(max(bound, pixels) / pixels)} "
                f"tokens and {around} around it"
            )
        if not pixels <= bound >= least:
            raise ValueError(
                f"a picture has {least} to {bound} pixels by picture_pixels_min and "
                f"picture_pixels_max; a token takes {pixels}"
            )
        self._size = {"shortest_edge": least, "longest_edge": bound}

    def place(
        self, ids: Sequence[int], messages: Sequence[ChatMessage], pictures: Sequence[Picture]
    ) -> PicturePrompt:
        """Give the pictures of a conversation their tokens. Raise ``ValueError`` if one is missing,
        or if the template has left one out."""
        shown = [part for message in messages for part in message.parts if isinstance(part, int)]
        if missing := [number for number in shown if number >= len(pictures)]:
            raise ValueError(f"it has no attachment {missing[0]}")
        return PicturePrompt(ids, [pictures[number] for number in shown], self.mark)

    def read_all(self, files: Sequence[bytes]) -> Pictures:
        pictures = []
        for number, data in enumerate(files, 1):
            try:
                pictures.append(self.read(data))
            except MediaError as error:
                which = f"Picture {number} of the conversation: " if len(files) > 1 else ""
                return Failed("invalid_input", f"{which}{error}", param="messages")
        return tuple(pictures)

    def read(self, data: bytes) -> Picture:
        """Decode a picture. Raise ``MediaError`` with a sentence for the client."""
        pixels = read_image(data)
        height, width = pixels.shape[:2]
        if max(height, width) > _RATIO_MAX * min(height, width):
            raise MediaError(
                f"The picture is {width}x{height} pixels; its sides may have a ratio of at most "
                f"{_RATIO_MAX}:1."
            )
        made = self._processor(
            images=[Image.fromarray(pixels)], size=self._size, return_tensors="pt"
        )
        patches: torch.Tensor = made["pixel_values"]
        _, rows, columns = made["image_grid_thw"][0].tolist()
        tokens = rows * columns // self._merge**2
        if tokens > self.tokens_max:
            # Only of sides so unequal that the shorter one cannot be scaled down further.
            raise MediaError(
                f"The picture is {width}x{height} pixels, which takes {tokens} tokens at least; "
                f"this model reads at most {self.tokens_max} of a picture. Crop it."
            )
        digest = hashlib.blake2b(f"{rows}x{columns}".encode(), digest_size=16)
        digest.update(patches.numpy().tobytes())
        return Picture(
            patches.to(self._dtype), rows // self._merge, columns // self._merge, digest.digest()
        )


def make_reader(
    path: Path, family: str, spec: ModelSpec, options: Options, config: Any, words: Vocabulary
) -> PictureReader | None:
    """Return the reader of an entry's pictures, or None if it reads none.

    Raise ``ValueError`` if the entry says that it does, and the checkpoint cannot.
    """
    if not reads_pictures(spec):
        return None
    if not has_vision(family):
        raise ValueError(
            f"limits.source_tokens says that it reads pictures, but a {family} has no vision tower"
        )
    mark = int(config.image_token_id)
    around = words.count_around(mark)
    vision = config.vision_config
    return PictureReader(path, spec, options, vision, mark=mark, around=around)


def _source_tokens(spec: ModelSpec) -> int:
    return int(spec.limits["source_tokens"])


def _read_processor(path: Path, vision: Any) -> Any:
    if not any((path / name).is_file() for name in _CONFIGURATIONS):
        raise ValueError(f"{path} has no {_CONFIGURATIONS[0]}, which pictures need")
    try:
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"the image processor of {path} cannot be read: {error}") from error
    for name, own in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if getattr(processor, name) != getattr(vision, own):
            raise ValueError(
                f"{path}: {name} of the image processor is {getattr(processor, name)}, but the "
                f"vision tower has {getattr(vision, own)}"
            )
    return processor
