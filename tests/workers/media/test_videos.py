"""Videos are encoded and decoded; hostile ones are refused with a reason."""

from __future__ import annotations

import contextlib
import io
import json
import random
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from workers.media import decode, encode
from workers.media.encode import Origin, Overview, VideoWriter
from workers.media.pixels import Audio, DecodedVideo, MediaError, Pixels
from workers.media.video_decode import open_video

ORIGIN = Origin("pocket", "req_1", seed=7, source="algorithmicallyEnhanced")


def _frames(count: int = 12, width: int = 64, height: int = 48) -> list[Pixels]:
    """A red bar that moves over blue, two columns a frame."""
    frames = []
    for place in range(count):
        frame = np.full((height, width, 3), (20, 60, 220), np.uint8)
        frame[:, place * 2 : place * 2 + 24] = (220, 30, 30)
        frames.append(frame)
    return frames


def _tone(seconds: float, rate: int = 16_000, channels: int = 1) -> Audio:
    wave = np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate) / 2
    return Audio(np.tile(wave.astype(np.float32), (channels, 1)), rate)


def _read(data: bytes, **limits: Any) -> DecodedVideo:
    given = {"pixels_max": 100_000, "frames_max": 200, "seconds_max": 10.0, **limits}
    return decode.read_video(data, **given)


def _muxed(format: str, codec: str, *, times: list[int] | None = None) -> bytes:
    """A clip as others make it; ``times`` of its frames in milliseconds."""
    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for place, frame in enumerate(_frames(len(times or range(12)))):
            drawn = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p")
            drawn.pts = times[place] if times else place * 40
            drawn.time_base = Fraction(1, 1000)
            container.mux(stream.encode(drawn))
        container.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("fps", [25, Fraction(30_000, 1001)])
def test_video_round_trip(fps: Fraction | int) -> None:
    frames = _frames()

    found = _read(encode.video(frames, fps, quality=100, origin=ORIGIN))

    assert found.frames.shape == (12, 48, 64, 3)
    assert found.fps == fps
    assert np.abs(found.frames.astype(int) - np.stack(frames)).mean() < 6
    np.testing.assert_allclose(found.frames[5, 20, 20], (220, 30, 30), atol=8)


def test_animated_webp_round_trip() -> None:
    frames = _frames()

    found = _read(encode.video(frames, 10, "webp", quality=90, origin=ORIGIN))

    assert found.frames.shape == (12, 48, 64, 3)
    assert found.fps == 10
    assert np.abs(found.frames.astype(int) - np.stack(frames)).mean() < 6


def test_mp4_has_a_widely_supported_format() -> None:
    data = encode.video(_frames(), 25, origin=ORIGIN)

    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_range) == (1, 1)
        assert stream.frames == 12
        assert json.loads(container.metadata["comment"])["request_id"] == "req_1"
    assert data.index(b"moov") < data.index(b"mdat"), "it starts before it is all there"


def test_animated_webp_names_its_origin() -> None:
    with Image.open(io.BytesIO(encode.video(_frames(3), 10, "webp", origin=ORIGIN))) as image:
        assert image.n_frames == 3
        assert image.getexif()[0x0131] == "Tollgate"
        assert b"algorithmicallyEnhanced" in image.info["xmp"]


@pytest.mark.parametrize("format", ["mp4", "webp"])
def test_odd_sizes_are_padded_in_mp4(format: Any) -> None:
    found = _read(encode.video(_frames(3, width=63, height=47), 5, format))

    expected = (48, 64) if format == "mp4" else (47, 63)
    assert found.frames.shape[1:3] == expected


@pytest.mark.parametrize("channels", [1, 2])
def test_audio_track_is_encoded(channels: int) -> None:
    data = encode.video(_frames(25), 25, audio=_tone(3, channels=channels))

    found = _read(data, audio=True).audio

    assert found is not None
    assert (len(found.samples), found.rate) == (channels, 16_000)
    assert abs(found.seconds - 1) < 0.15, "no longer than the picture"
    middle = found.samples[0, 4_000:12_000]
    peak = np.abs(np.fft.rfft(middle)).argmax() * 16_000 / len(middle)
    assert abs(peak - 440) < 5
    assert _read(data).audio is None


@pytest.mark.parametrize(
    ("format", "codec"), [("mov", "libx264"), ("webm", "libvpx-vp9"), ("webm", "libvpx")]
)
def test_videos_of_other_encoders_are_decoded(format: str, codec: str) -> None:
    found = _read(_muxed(format, codec))

    assert found.frames.shape == (12, 48, 64, 3)
    assert found.fps == 25
    np.testing.assert_allclose(found.frames[5, 20, 20], (220, 30, 30), atol=20)


def test_variable_frame_rate_becomes_constant() -> None:
    data = _muxed("mp4", "libx264", times=[0, 40, 80, 120, 160, 200, 800, 840])

    found = _read(data)

    seconds = len(found.frames) / found.fps
    assert abs(seconds - 0.88) < 0.1
    same = [bool((a == b).all()) for a, b in zip(found.frames, found.frames[1:], strict=False)]
    assert sum(same) >= len(found.frames) / 3, "the long frame is repeated"


def test_rotated_video_is_decoded_upright() -> None:
    data = bytearray(encode.video(_frames(3), 5))
    upright = _read(bytes(data)).frames
    turned = [0, 1 << 16, 0, (1 << 32) - (1 << 16), 0, 0, 0, 0, 1 << 30]
    plain = [1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30]
    old, new = (b"".join(x.to_bytes(4, "big") for x in row) for row in (plain, turned))
    place = data.index(old, data.index(b"tkhd"))
    data[place : place + 36] = new

    found = _read(bytes(data)).frames

    np.testing.assert_array_equal(found, np.rot90(upright, -1, axes=(1, 2)))


def test_frames_come_one_by_one() -> None:
    source = open_video(
        encode.video(_frames(25), 25), pixels_max=100_000, frames_max=25, seconds_max=1.0
    )

    assert (source.width, source.height, source.fps, source.frames_expected) == (64, 48, 25, 25)
    assert sum(1 for _ in source.frames) == 25


@pytest.mark.parametrize("format", ["mp4", "webp"])
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"pixels_max": 3071}, "64x48, 3072 pixels; at most 3071"),
        ({"frames_max": 11}, "more than 11 frames"),
        ({"seconds_max": 1.0}, "1.2 seconds long; at most 1"),
    ],
)
def test_too_large_video_is_refused(format: Any, limits: Any, said: str) -> None:
    data = encode.video(_frames(12), 10, format)

    with pytest.raises(MediaError, match=said):
        _read(data, **limits)


def test_false_length_in_the_header_does_not_bypass_limits() -> None:
    data = encode.video(_frames(100), 25)
    for name, after in ((b"mvhd", 16), (b"mdhd", 16)):
        place = data.index(name) + 4 + after
        data = data[:place] + (100).to_bytes(4, "big") + data[place + 4 :]

    with pytest.raises(MediaError, match=r"more than 50 frames|seconds long"):
        _read(data, frames_max=50, seconds_max=2.0)


def test_an_endless_last_frame_is_refused() -> None:
    with pytest.raises(MediaError, match="seconds long"):
        _read(_muxed("mp4", "libx264", times=[0, 40, 80, 3_600_000]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a supported video; MP4, MOV, WebM"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "not a supported video"),
        (b"RIFF\0\0\0\0AVI LIST", "not a supported video"),
        (encode.image(_frames(1)[0], "webp"), "not animated"),
        (_muxed("avi", "mpeg4"), "not a supported video"),
        (_muxed("matroska", "libx264"), "not a supported video"),
        (_muxed("mov", "rawvideo"), "codec of the video is rawvideo; accepted are h264"),
        (encode.video(_frames(), 25)[:600], "damaged"),
        (encode.video(_frames(60), 10)[:-2500], "ends after|truncated|damaged"),
        (encode.video(_frames(), 10, "webp")[:-400], "truncated"),
        (
            _muxed("webm", "libvpx", times=[*range(0, 4000, 40)])[:1500],
            "ends after|truncated|damaged",
        ),
    ],
)
def test_invalid_video_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        _read(data)


@pytest.mark.parametrize("format", ["mp4", "webp"])
def test_damage_always_raises_a_media_error(format: Any) -> None:
    whole = encode.video(_frames(8), 10, format)
    r = random.Random(4)

    for _ in range(60):
        data = bytearray(whole)
        for _ in range(r.randint(1, 8)):
            data[r.randrange(12, len(data))] = r.randrange(256)
        with contextlib.suppress(MediaError):  # and nothing else
            _read(bytes(data), audio=True)


def test_video_without_frames_raises() -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        encode.video([], 25)


def test_closed_writer_deletes_its_files() -> None:
    with VideoWriter(25) as writer:
        for frame in _frames(3):
            writer.add(frame)
        folder = writer._encoder._path.parent  # type: ignore[union-attr]
        assert (writer.duration_ms, folder.is_dir()) == (120, True)

    assert not folder.exists()


def test_spritesheet_covers_the_video_from_first_to_last_frame() -> None:
    sheet = encode.spritesheet(_frames(40), side=32)

    assert sheet.shape == (4 * 24, 4 * 32, 3)
    first, last = sheet[:24, :32], sheet[-24:, -32:]
    assert first[12, 5, 0] > 200
    assert last[12, 5, 0] < 50
    assert encode.spritesheet(_frames(3)).shape == (48, 3 * 64, 3)


def test_thumbnail_keeps_the_aspect_ratio() -> None:
    assert encode.thumbnail(_frames(1)[0], side=32).shape == (24, 32, 3)
    assert encode.thumbnail(_frames(1)[0]).shape == (48, 64, 3)


def test_overview_of_a_long_video_stays_small() -> None:
    overview = Overview(side=16)

    for place in range(1000):
        overview.add(np.full((48, 64, 3), place // 4, np.uint8))

    assert len(overview._frames) < 64
    sheet = overview.spritesheet()
    assert sheet.shape == (4 * 12, 4 * 16, 3)
    assert sheet[0, 0, 0] == 0
    assert sheet[-1, -1, 0] > 230
