"""Frames are encoded on another thread, a few behind the steps that make them."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import av
import numpy as np
import pytest

from workers.media.encode import Origin
from workers.media.pixels import Pixels
from workers.media.video_files import VideoFiles

PATIENCE_S = 30


def _video(frames_expected: int) -> VideoFiles:
    return VideoFiles(
        Fraction(10), frames_expected=frames_expected, origin=Origin("tiny", "request")
    )


def _frame(value: int) -> Pixels:
    return np.full((32, 48, 3), value, np.uint8)


def test_frames_are_encoded_in_order_while_more_are_added() -> None:
    video, may_encode = _video(6), threading.Event()

    def late(value: int) -> Pixels:
        assert may_encode.wait(PATIENCE_S)
        return _frame(value)

    # One is being made, and two wait.
    for value in (0, 40, 80):
        video.add_made(lambda value=value: late(value))  # type: ignore[misc]
    assert (video.frames, video.duration_ms) == (3, 300)
    with ThreadPoolExecutor(1) as other:
        fourth = other.submit(video.add, _frame(120))
        with pytest.raises(TimeoutError):
            fourth.result(0.2)
        may_encode.set()
        fourth.result(PATIENCE_S)
    video.add(_frame(160))
    video.add(_frame(200))

    media, files = video.finish()
    video.close()

    assert (media[0].role, media[0].duration_ms) == ("output", 600)
    with av.open(io.BytesIO(files[0].data)) as container:
        means = [frame.to_ndarray(format="rgb24").mean() for frame in container.decode(video=0)]
    assert means == pytest.approx([0, 40, 80, 120, 160, 200], abs=3)


def test_exception_of_a_frame_is_raised_by_a_later_call() -> None:
    def broken() -> Pixels:
        raise RuntimeError("no frame")

    video = _video(2)
    video.add(_frame(0))
    video.add_made(broken)
    with pytest.raises(RuntimeError, match="no frame"):
        video.finish()
    video.close()


def test_closing_forgets_frames_that_wait() -> None:
    before = set(threading.enumerate())
    video, may_encode, made = _video(3), threading.Event(), []

    def late() -> Pixels:
        assert may_encode.wait(PATIENCE_S)
        made.append(1)
        return _frame(0)

    for _ in range(3):
        video.add_made(late)
    threading.Timer(0.2, may_encode.set).start()
    video.close()

    assert len(made) == 1
    started = set(threading.enumerate()) - before
    assert not [thread.name for thread in started if thread.name.startswith("video")]
