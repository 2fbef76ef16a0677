"""Measured properties of finished files; nothing outside a file is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.fake_gmi import clip, picture, sound
from workers.media.measure import MediaProperties, measure


@pytest.mark.parametrize(
    ("data", "content_type", "measured"),
    [
        (picture(48, 32), "image/png", MediaProperties(48, 32)),
        (clip(18, 12), "video/mp4", MediaProperties(48, 32, 1500, 12)),
        (sound(0.25), "audio/wav", MediaProperties(duration_ms=250)),
        (b"", "image/png", MediaProperties()),
        (picture()[:20], "image/png", MediaProperties()),
        (clip()[:100], "video/mp4", MediaProperties()),
        (b"RIFF", "audio/wav", MediaProperties()),
    ],
)
def test_size_rate_and_duration_are_read_from_the_header(
    data: bytes, content_type: str, measured: MediaProperties
) -> None:
    assert measure(data, content_type) == measured


def test_playlist_does_not_open_other_files(tmp_path: Path) -> None:
    (tmp_path / "inside.wav").write_bytes(sound(1.0))
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/inside.wav\n".encode()

    assert measure(playlist, "audio/mpeg") == MediaProperties()
