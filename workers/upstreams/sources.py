"""Converts a job's attachments to the types that an upstream's upload accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from workers.contract.jobs import Failed
from workers.contract.media import File
from workers.media.decode import read_image
from workers.media.encode import image
from workers.media.pixels import MediaError

_UPLOAD_TYPES: Final[Mapping[str, str]] = {
    "image/png": "image/png",
    "image/jpeg": "image/jpg",
    "image/jpg": "image/jpg",
    "video/mp4": "video/mp4",
    "audio/mpeg": "audio/mp3",
    "audio/mp3": "audio/mp3",
    "audio/wav": "audio/wav",
    "audio/x-wav": "audio/wav",
}
"""Content type in the signature of the upload URL, by our content type."""


def prepare_sources(files: Sequence[bytes], types: Sequence[str]) -> list[File] | Failed:
    """Return the files with their upload types; images of other types are converted to PNG."""
    prepared = []
    for place, (data, content_type) in enumerate(zip(files, types, strict=True)):
        if content_type in _UPLOAD_TYPES:
            prepared.append(File(_UPLOAD_TYPES[content_type], data))
        elif content_type.startswith("image/"):
            try:
                pixels = read_image(data, alpha=True)
            except MediaError as error:
                return Failed("invalid_input", f"Input file {place}: {error}")
            prepared.append(File("image/png", image(pixels, "png")))
        else:
            return Failed(
                "invalid_input",
                f"Input file {place} is {content_type}; this model's upstream accepts images, "
                "MP4 video, and MP3 or WAV audio.",
            )
    return prepared
