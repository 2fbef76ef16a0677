"""The engine of ``talking-head``: a portrait and a recording become a video in which it speaks.

A step hears and looks for one request that is new, and draws frames of all requests together. Each
frame depends on its own portrait and mouth alone, so nobody's video depends on who else is served.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final

import av
import msgspec
import numpy as np
import torch
from PIL import Image

from workers.contract.jobs import Cancelled, Completed, Event, Failed, Job, Outcome, RequestId
from workers.contract.media import TalkingInput
from workers.contract.models import ModelSpec
from workers.engines.talking import listening
from workers.engines.talking.networks import PAINTER_SIDE, Networks, Stroke, read_networks
from workers.engines.talking.options import FPS_MAX, read_options
from workers.engines.talking.portrait import PortraitError
from workers.engines.talking.request import TalkingHeadRequest
from workers.engines.threads import threads_for, use_threads
from workers.media.clip_files import ClipFiles
from workers.media.decode import read_image
from workers.media.encode import Origin
from workers.media.pixels import MediaError, Pixels
from workers.media.recordings import read_audio
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    Estimate,
    Later,
    PhaseClock,
    Prepared,
    StepReport,
    Wait,
)

log = logging.getLogger(__name__)

TASK: Final = "talking-head"
_SOUND_RATE: Final = 48_000
"""Of the video, in Hz."""
_BYTE_US: Final = 2.0
"""Of an attachment: a guess that only orders requests."""
_ROW_BYTES: Final = 8 * 1024 * 1024
"""Of device memory for each frame in a step."""


class TalkingEngine:
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._networks: Networks | None = None
        self._threads = 1
        self._running: dict[RequestId, TalkingHeadRequest] = {}

    def load(self) -> None:
        """Read the weights and warm up. Raise ``ValueError`` with the reason."""
        networks = read_networks(Path(self._spec.checkpoint or ""))
        device = self._options.torch_device
        networks.module.to(device)
        self._threads = threads_for(networks.module, self._options.threads)
        use_threads(self._threads)
        with torch.inference_mode():
            seen = networks.painter.look(torch.zeros(1, 3, PAINTER_SIDE, PAINTER_SIDE).to(device))
            networks.painter(seen, torch.zeros(1, 4).to(device))
        self._networks = networks

    def unload(self) -> None:
        self._networks = None
        gc.collect()
        torch.cuda.empty_cache()

    def estimate(self, job: Job) -> Estimate:
        size = sum(blob.bytes for blob in job.attachments)
        return Estimate(round(size * _BYTE_US), self._options.step_rows * _ROW_BYTES)

    def prepare(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest | Failed:
        """Read the portrait and the recording of a job."""
        try:
            return self._prepare(job, files)
        except msgspec.ValidationError as error:
            return Failed("invalid_input", f"The input cannot be read: {error}.")

    def admit(
        self, job: Job, clock: PhaseClock, files: Sequence[bytes] | Prepared = ()
    ) -> Admission:
        if len(self._running) >= self._options.slots:
            return Wait()
        with clock.phase("preprocess"):
            work = files.value if isinstance(files, Prepared) else self.prepare(job, files)
        if isinstance(work, Failed):
            return work
        self._running[job.request_id] = work
        return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        outcomes: dict[RequestId, Outcome | Later] = {}
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            self._begin(weights, outcomes)
            batch = self._choose(outcomes)
            stroke = self._stroke(batch)
        with clock.phase("postprocess"):
            self._draw(batch, stroke, weights, outcomes)
            events = self._collect(outcomes)
        return StepReport(weights or dict.fromkeys(outcomes, 1.0), events, tuple(outcomes.items()))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._running[request_id].cancelled = reason

    def release(self, request_id: RequestId) -> None:
        work = self._running.pop(request_id)
        if not work.finishing:
            work.clip.close()

    # --- What is asked for ------------------------------------------------------------------------

    def _prepare(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest | Failed:
        asked = msgspec.convert(job.input, TalkingInput)
        if len(files) != 2:
            message = f"{self._spec.name} needs a portrait and a recording of what it says."
            return Failed("invalid_input", message, param="audio" if files else "image")
        fps = Fraction(asked.fps or self._options.fps)
        if not 1 <= fps <= FPS_MAX:
            message = f"fps is {asked.fps}; accepted are 1 to {FPS_MAX}."
            return Failed("unsupported_parameter", message, param="fps")
        try:
            pixels = self._fitted(read_image(files[0], pixels_max=self._options.pixels_max))
        except MediaError as error:
            return Failed("invalid_input", str(error), param="image")
        held_ms = job.limits.video_ms
        seconds = min(self._options.seconds_max, held_ms / 1000 if held_ms else math.inf)
        try:
            sound = read_audio(files[1], rate=_SOUND_RATE, seconds_max=seconds, mono=False)
            heard = read_audio(files[1], rate=listening.RATE, seconds_max=seconds)
        except MediaError as error:
            return Failed("invalid_input", str(error), param="audio")
        frames = math.ceil(Fraction(sound.samples.shape[1], _SOUND_RATE) * fps)
        if held_ms:  # what was held for, though a last frame be cut short
            frames = min(frames, max(1, math.floor(Fraction(held_ms, 1000) * fps)))
        origin = Origin(self._spec.name, job.request_id)
        return TalkingHeadRequest(
            job.request_id,
            pixels,
            listening.loudness(heard.samples[0]),
            fps,
            frames,
            ClipFiles(fps, frames_expected=frames, origin=origin, audio=sound),
        )

    def _fitted(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        scale = self._options.side / max(height, width)
        if scale >= 1:
            return pixels
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))

    # --- Steps ------------------------------------------------------------------------------------

    def _begin(
        self, weights: dict[RequestId, float], outcomes: dict[RequestId, Outcome | Later]
    ) -> None:
        """Hear and look for one of those that are new, so that a step stays short."""
        assert self._networks is not None
        for id, work in self._running.items():
            if work.ready or work.cancelled is not None:
                continue
            weights[id] = float(self._options.step_rows)
            try:
                work.begin(self._networks)
            except PortraitError as error:
                outcomes[id] = Failed("invalid_input", str(error), param="image")
            return

    def _choose(
        self, outcomes: dict[RequestId, Outcome | Later]
    ) -> list[tuple[TalkingHeadRequest, int]]:
        """How many frames of each request are drawn: as many of one as of the other."""
        works = [
            work
            for id, work in self._running.items()
            if work.ready and work.cancelled is None and id not in outcomes
        ]
        room = self._options.step_rows
        # Who has waited longest stands in front, and takes what does not divide.
        works.sort(key=lambda work: work.clip.frames)
        chosen = []
        for place, work in enumerate(works[:room]):
            share = -(-room // (min(len(works), room + place) - place))
            count = min(share, work.left, room)
            room -= count
            chosen.append((work, count))
        return chosen

    def _stroke(self, batch: Sequence[tuple[TalkingHeadRequest, int]]) -> Stroke | None:
        assert self._networks is not None
        if not batch:
            return None
        device = self._options.torch_device
        with torch.inference_mode():
            shapes = torch.from_numpy(np.concatenate([work.next(n) for work, n in batch]))
            portraits = [(work.portrait, n) for work, n in batch if work.portrait is not None]
            seen = [
                torch.cat([one.seen[level].expand(n, -1, -1, -1) for one, n in portraits])
                for level in range(len(portraits[0][0].seen))
            ]
            stroke: Stroke = self._networks.painter(seen, shapes.to(device))
        return stroke

    def _draw(
        self,
        batch: Sequence[tuple[TalkingHeadRequest, int]],
        stroke: Stroke | None,
        weights: dict[RequestId, float],
        outcomes: dict[RequestId, Outcome | Later],
    ) -> None:
        place = 0
        for work, count in batch:
            assert stroke is not None
            assert work.portrait is not None
            rows = slice(place, place + count)
            place += count
            weights[work.request_id] = weights.get(work.request_id, 0.0) + count
            part = Stroke(stroke.flow[rows], stroke.cover[rows], stroke.paint[rows])
            try:
                with torch.inference_mode():
                    for frame in work.portrait.frames(part):
                        work.clip.add(frame)
            except av.FFmpegError:
                outcomes[work.request_id] = _unencoded(work)

    def _collect(self, outcomes: dict[RequestId, Outcome | Later]) -> list[tuple[RequestId, Event]]:
        """Say how far each request is, and end those that are done."""
        events: list[tuple[RequestId, Event]] = []
        for id, work in self._running.items():
            if id in outcomes:
                continue
            if work.cancelled is not None:
                outcomes[id] = Cancelled(work.cancelled, usage=work.usage())
                continue
            if progress := work.progress():
                events.append((id, progress))
            if work.left == 0:
                work.finishing = True
                outcomes[id] = Later(partial(_finish, work), usage=work.usage())
        return events


def _finish(work: TalkingHeadRequest) -> Outcome:
    """Make the files of a request that has left the engine."""
    try:
        media, files = work.clip.finish()
        return Completed(work.usage(), output={"media": media}, files=tuple(files))
    except av.FFmpegError:
        return _unencoded(work)
    finally:
        work.clip.close()


def _unencoded(work: TalkingHeadRequest) -> Failed:
    log.exception("result could not be encoded", extra={"request_id": work.request_id})
    return Failed("engine_error", "The result could not be encoded.")
