"""The engine of ``talking-head``: a portrait and a recording become a video in which it speaks.

A step hears and looks for one request that is new, and draws frames of all requests together. Each
frame depends on its own portrait and mouth alone, so nobody's video depends on who else is served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final

import av
import numpy as np
import torch
from PIL import Image

from workers.contract.jobs import Cancelled, Event, Failed, Job, Outcome, RequestId
from workers.contract.media import TalkingInput
from workers.contract.models import ModelSpec
from workers.engines.talking import listening
from workers.engines.talking.networks import PAINTER_SIDE, Networks, Stroke, read_networks
from workers.engines.talking.options import FPS_MAX, Options, read_options
from workers.engines.talking.portrait import PortraitError
from workers.engines.talking.request import TalkingHeadRequest
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input, reading
from workers.engines.visual_output import complete, encoding_failed
from workers.media.clip_files import ClipFiles
from workers.media.decode import read_image
from workers.media.encode import Origin
from workers.media.pixels import Pixels
from workers.media.recordings import read_audio
from workers.protocol.engine import Estimate, Later, PhaseClock, StepReport

TASK: Final = "talking-head"
_SOUND_RATE: Final = 48_000
"""Of the video, in Hz."""
_BYTE_US: Final = 2.0
"""Of an attachment: a guess that only orders requests."""
_ROW_BYTES: Final = 8 * 1024 * 1024
"""Of device memory for each frame in a step."""


class TalkingEngine(TorchEngine[Options, Networks, TalkingHeadRequest]):
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))

    def _load(self) -> Networks:
        networks = read_networks(Path(self._spec.checkpoint or ""))
        device = self._options.torch_device
        networks.module.to(device)
        self._choose_threads(networks.module)
        with torch.inference_mode():
            seen = networks.painter.look(torch.zeros(1, 3, PAINTER_SIDE, PAINTER_SIDE).to(device))
            networks.painter(seen, torch.zeros(1, 4).to(device))
        return networks

    def estimate(self, job: Job) -> Estimate:
        size = sum(blob.bytes for blob in job.attachments)
        return Estimate(round(size * _BYTE_US), self._options.step_rows * _ROW_BYTES)

    def prepare(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest | Failed:
        """Read the portrait and the recording of a job."""
        return self._prepare(job, files)

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

    def release(self, request_id: RequestId) -> None:
        work = self._running.pop(request_id)
        if not work.finishing:
            work.clip.close()

    # --- What is asked for ------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest:
        asked = read_input(job, TalkingInput)
        if len(files) != 2:
            message = f"{self._spec.name} needs a portrait and a recording of what it says."
            raise InputError("invalid_input", message, "audio" if files else "image")
        fps = Fraction(asked.fps or self._options.fps)
        if not 1 <= fps <= FPS_MAX:
            message = f"fps is {asked.fps}; accepted are 1 to {FPS_MAX}."
            raise InputError("unsupported_parameter", message, "fps")
        with reading("image"):
            pixels = self._fitted(read_image(files[0], pixels_max=self._options.pixels_max))
        held_ms = job.limits.video_ms
        seconds = min(self._options.seconds_max, held_ms / 1000 if held_ms else math.inf)
        with reading("audio"):
            sound = read_audio(files[1], rate=_SOUND_RATE, seconds_max=seconds, mono=False)
            heard = read_audio(files[1], rate=listening.RATE, seconds_max=seconds)
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
        for id, work in self._running.items():
            if work.ready or work.cancelled is not None:
                continue
            weights[id] = float(self._options.step_rows)
            try:
                work.begin(self._model)
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
            stroke: Stroke = self._model.painter(seen, shapes.to(device))
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
                outcomes[work.request_id] = encoding_failed(work.request_id)

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
                usage = work.usage()
                finish = partial(complete, id, work.clip, usage)
                outcomes[id] = Later(finish, usage=usage)
        return events
