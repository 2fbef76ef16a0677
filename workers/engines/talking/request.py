"""One request on its way: a portrait, what it says, and the clip that becomes of both."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from workers.contract.jobs import Progress, RequestId, Usage
from workers.engines.talking.listening import mouths_of
from workers.engines.talking.networks import Networks
from workers.engines.talking.portrait import Portrait
from workers.media.clip_files import ClipFiles, band
from workers.media.pixels import Pixels
from workers.protocol.engine import CancelReason


@dataclass(slots=True, eq=False)
class TalkingHeadRequest:
    request_id: RequestId
    pixels: Pixels
    """The portrait as large as the video."""
    bands: torch.Tensor
    """Loudness of the recording, see ``listening``."""
    fps: Fraction
    frames: int
    clip: ClipFiles
    portrait: Portrait | None = None
    """Once it has been looked at."""
    mouths: npt.NDArray[np.float32] | None = None
    """``(frames, 4)``, once the recording has been heard."""
    finishing: bool = False
    """Whether its clip is being made into files, which then also closes it."""
    cancelled: CancelReason | None = None
    began: float = field(default_factory=time.monotonic)
    _shown: int = 0

    @property
    def ready(self) -> bool:
        return self.portrait is not None

    @property
    def left(self) -> int:
        return self.frames - self.clip.frames

    def begin(self, networks: Networks) -> None:
        """Hear the recording and look at the portrait. Raise ``NoMouth``."""
        self.portrait = Portrait(self.pixels, networks.finder, networks.painter)
        self.mouths = mouths_of(networks.ear, self.bands, fps=self.fps, frames=self.frames)

    def next(self, count: int) -> npt.NDArray[np.float32]:
        """The mouths of the next frames."""
        assert self.mouths is not None
        return self.mouths[self.clip.frames : self.clip.frames + count]

    def progress(self) -> Progress | None:
        """How far it is, if that is a percent more than was said before."""
        done = self.clip.frames
        if (done - self._shown) * 100 < self.frames and (done < self.frames or done == self._shown):
            return None
        self._shown = done
        spent_ms = (time.monotonic() - self.began) * 1000
        return Progress(done, self.frames, round(spent_ms * self.left / done))

    def usage(self) -> Usage:
        height, width = self.pixels.shape[:2]
        return Usage(
            requests=1,
            video_ms=self.clip.duration_ms,
            steps=self.clip.frames,
            attributes={"resolution": band((width, height))},
        )
