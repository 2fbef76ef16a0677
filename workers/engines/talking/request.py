"""State of one talking-head request: portrait, recording, and the video so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from workers.contract.jobs import Progress, RequestId, Usage
from workers.engines.interrupting import SLICE_S, Interruptible
from workers.engines.talking.mouth_shapes import predict_mouths
from workers.engines.talking.networks import Networks
from workers.engines.talking.portrait import Portrait
from workers.media.pixels import Pixels
from workers.media.video_files import VideoFiles, resolution_name
from workers.protocol.engine import CancelReason


@dataclass(slots=True, eq=False)
class TalkingHeadRequest:
    request_id: RequestId
    pixels: Pixels
    """The portrait, in the size of the video."""
    bands: torch.Tensor
    """Band loudness of the recording, see ``mouth_shapes``."""
    fps: Fraction
    frames: int
    video: VideoFiles
    portrait: Portrait | None = None
    """The analysed portrait; None before ``analyse``."""
    mouths: npt.NDArray[np.float32] | None = None
    """Mouth shapes ``(frames, 4)``; None before ``analyse``."""
    finishing: bool = False
    """Whether the video is being encoded; that also closes it."""
    cancelled: CancelReason | None = None
    started_s: float = field(default_factory=time.monotonic)
    _reported: int = 0
    _analysis: Interruptible | None = None
    """The analysis while it is interrupted."""

    @property
    def ready(self) -> bool:
        return self.portrait is not None

    @property
    def remaining(self) -> int:
        return self.frames - self.video.frames

    def analyse(self, networks: Networks) -> None:
        """Find the mouth and predict its shapes, for a slice of time; ``ready`` at the end.

        Raise ``PortraitError`` if there is no mouth.
        """
        if self._analysis is None:
            self._analysis = Interruptible(
                lambda: self._analyse(networks), slice_s=SLICE_S, now_s=time.monotonic
            )
        if self._analysis.run_slice():
            self._analysis = None

    def abandon(self) -> None:
        """End an analysis that is interrupted."""
        if self._analysis is not None:
            self._analysis.abandon()
            self._analysis = None

    def _analyse(self, networks: Networks) -> None:
        portrait = Portrait(self.pixels, networks.landmark_detector, networks.mouth_renderer)
        self.mouths = predict_mouths(
            networks.mouth_predictor, self.bands, fps=self.fps, frames=self.frames
        )
        self.portrait = portrait

    def next_mouths(self, count: int) -> npt.NDArray[np.float32]:
        """Return the mouth shapes of the next ``count`` frames."""
        assert self.mouths is not None
        return self.mouths[self.video.frames : self.video.frames + count]

    def progress(self) -> Progress | None:
        """Return the progress if it has grown by a percent since the last report."""
        done = self.video.frames
        if (done - self._reported) * 100 < self.frames and (
            done < self.frames or done == self._reported
        ):
            return None
        self._reported = done
        spent_ms = (time.monotonic() - self.started_s) * 1000
        return Progress(done, self.frames, round(spent_ms * self.remaining / done))

    def usage(self) -> Usage:
        height, width = self.pixels.shape[:2]
        return Usage(
            requests=1,
            video_ms=self.video.duration_ms,
            steps=self.video.frames,
            attributes={"resolution": resolution_name((width, height))},
        )
