"""The engine of ``talking-head``: animates a portrait so that it speaks a recording.

A step analyses a new request, interrupted between the layers of its networks, or renders frames of
all requests in one batch, as many as fit into its time. Each frame depends only on its own portrait
and mouth shape, so a video does not depend on other requests.
"""

from __future__ import annotations

import math
import time
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
from workers.engines.interrupting import add_hooks
from workers.engines.row_pacing import RowPacing
from workers.engines.talking import mouth_shapes
from workers.engines.talking.networks import (
    RENDERER_SIDE,
    MouthPatch,
    Networks,
    check_architecture,
    read_networks,
)
from workers.engines.talking.options import FPS_MAX, Options, read_options
from workers.engines.talking.portrait import PortraitError
from workers.engines.talking.request import TalkingHeadRequest
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input, reading
from workers.engines.visual_output import complete, encoding_failed
from workers.media.decode import read_image
from workers.media.encode import Origin
from workers.media.pixels import Pixels
from workers.media.recordings import read_audio
from workers.media.video_files import VideoFiles
from workers.protocol.engine import Deferred, PhaseClock, StepReport

TASK: Final = "talking-head"
_AUDIO_RATE: Final = 48_000
"""Sample rate of the video's audio, in Hz."""


class TalkingEngine(TorchEngine[Options, Networks, TalkingHeadRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._pacing = RowPacing(self._options.step_rows)

    def _inspect(self) -> None:
        check_architecture(Path(self._spec.checkpoint or ""))

    def _load(self) -> Networks:
        networks = read_networks(Path(self._spec.checkpoint or ""))
        device = self._options.torch_device
        networks.module.to(device)
        self._choose_threads(networks.module)
        add_hooks(networks.module)
        with torch.inference_mode():
            features = networks.mouth_renderer.encode(
                torch.zeros(1, 3, RENDERER_SIDE, RENDERER_SIDE).to(device)
            )
            networks.mouth_renderer(features, torch.zeros(1, 4).to(device))
        return networks

    def prepare(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest | Failed:
        """Decode the portrait and the recording of a job."""
        return self._prepare(job, files)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        outcomes: dict[RequestId, Outcome | Deferred] = {}
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            batch: Sequence[tuple[TalkingHeadRequest, int]] = ()
            if not self._analyse_one(weights, outcomes):
                batch = self._allocate_frames(outcomes)
            started_s = time.monotonic()
            patches = self._render_mouths(batch)
        with clock.phase("postprocess"):
            self._add_frames(batch, patches, weights, outcomes)
            self._pacing.record(sum(count for _, count in batch), time.monotonic() - started_s)
            events = self._collect(outcomes)
        return StepReport(weights or dict.fromkeys(outcomes, 1.0), events, tuple(outcomes.items()))

    def release(self, request_id: RequestId) -> None:
        request = self._running.pop(request_id)
        request.abandon()
        if not request.finishing:
            request.video.close()

    # --- Input ------------------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> TalkingHeadRequest:
        input = read_input(job, TalkingInput)
        if len(files) != 2:
            message = f"{self._spec.name} needs a portrait and a recording of speech."
            raise InputError("invalid_input", message, "audio" if files else "image")
        fps = Fraction(input.fps or self._options.fps)
        if not 1 <= fps <= FPS_MAX:
            message = f"fps is {input.fps}; accepted are 1 to {FPS_MAX}."
            raise InputError("unsupported_parameter", message, "fps")
        with reading("image"):
            pixels = self._fit(read_image(files[0], pixels_max=self._options.pixels_max))
        held_ms = job.limits.video_ms
        seconds = min(self._options.seconds_max, held_ms / 1000 if held_ms else math.inf)
        with reading("audio"):
            audio = read_audio(files[1], rate=_AUDIO_RATE, seconds_max=seconds, mono=False)
            speech = read_audio(files[1], rate=mouth_shapes.RATE, seconds_max=seconds)
        frames = math.ceil(Fraction(audio.samples.shape[1], _AUDIO_RATE) * fps)
        if held_ms:  # never longer than the hold covers, even if the last frame is cut
            frames = min(frames, max(1, math.floor(Fraction(held_ms, 1000) * fps)))
        origin = Origin(self._spec.name, job.request_id)
        return TalkingHeadRequest(
            job.request_id,
            pixels,
            mouth_shapes.loudness(speech.samples[0]),
            fps,
            frames,
            VideoFiles(fps, frames_expected=frames, origin=origin, audio=audio),
        )

    def _fit(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        scale = self._options.side / max(height, width)
        if scale >= 1:
            return pixels
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))

    # --- Steps ------------------------------------------------------------------------------------

    def _analyse_one(
        self, weights: dict[RequestId, float], outcomes: dict[RequestId, Outcome | Deferred]
    ) -> bool:
        """Analyse a new request for a slice of time. Return whether there was one."""
        for id, request in self._running.items():
            if request.ready or request.cancelled is not None:
                continue
            weights[id] = 1.0
            try:
                request.analyse(self._model)
            except PortraitError as error:
                outcomes[id] = Failed("invalid_input", str(error), param="image")
            return True
        return False

    def _allocate_frames(
        self, outcomes: dict[RequestId, Outcome | Deferred]
    ) -> list[tuple[TalkingHeadRequest, int]]:
        """Divide the step's frames equally among the requests."""
        requests = [
            request
            for id, request in self._running.items()
            if request.ready and request.cancelled is None and id not in outcomes
        ]
        rows_left = self._pacing.rows
        # The request with the fewest frames comes first and gets the remainder.
        requests.sort(key=lambda request: request.video.frames)
        chosen = []
        for position, request in enumerate(requests[:rows_left]):
            share = -(-rows_left // (min(len(requests), rows_left + position) - position))
            count = min(share, request.remaining, rows_left)
            rows_left -= count
            chosen.append((request, count))
        return chosen

    def _render_mouths(self, batch: Sequence[tuple[TalkingHeadRequest, int]]) -> MouthPatch | None:
        if not batch:
            return None
        device = self._options.torch_device
        with torch.inference_mode():
            shapes = torch.from_numpy(
                np.concatenate([request.next_mouths(n) for request, n in batch])
            )
            portraits = [
                (request.portrait, n) for request, n in batch if request.portrait is not None
            ]
            features = [
                torch.cat([one.features[level].expand(n, -1, -1, -1) for one, n in portraits])
                for level in range(len(portraits[0][0].features))
            ]
            patches: MouthPatch = self._model.mouth_renderer(features, shapes.to(device))
        return patches

    def _add_frames(
        self,
        batch: Sequence[tuple[TalkingHeadRequest, int]],
        patches: MouthPatch | None,
        weights: dict[RequestId, float],
        outcomes: dict[RequestId, Outcome | Deferred],
    ) -> None:
        position = 0
        for request, count in batch:
            assert patches is not None
            assert request.portrait is not None
            rows = slice(position, position + count)
            position += count
            weights[request.request_id] = weights.get(request.request_id, 0.0) + count
            part = MouthPatch(patches.flow[rows], patches.cover[rows], patches.paint[rows])
            try:
                with torch.inference_mode():
                    for frame in request.portrait.frames(part):
                        request.video.add(frame)
            except av.FFmpegError:
                outcomes[request.request_id] = encoding_failed(request.request_id)

    def _collect(
        self, outcomes: dict[RequestId, Outcome | Deferred]
    ) -> list[tuple[RequestId, Event]]:
        """Report progress, and end requests that are done."""
        events: list[tuple[RequestId, Event]] = []
        for id, request in self._running.items():
            if id in outcomes:
                continue
            if request.cancelled is not None:
                outcomes[id] = Cancelled(request.cancelled, usage=request.usage())
                continue
            if progress := request.progress():
                events.append((id, progress))
            if request.remaining == 0:
                request.finishing = True
                usage = request.usage()
                finish = partial(complete, id, request.video, usage)
                outcomes[id] = Deferred(finish, usage=usage)
        return events
