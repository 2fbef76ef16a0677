"""Portraits in a batch equal portraits alone, and failures stay with their request."""

from __future__ import annotations

import io
from typing import Any

import av
import msgspec
import numpy as np
import pytest

from tests.workers.driving import Run
from tests.workers.llm.driver import Clock
from tests.workers.talking.driver import engine_of, frames_of, job, person, png, speech, wav
from workers.contract.jobs import Cancelled, Completed, Failed, Outcome, Progress, RequestId
from workers.contract.media import Medium
from workers.contract.models import ModelSpec
from workers.engines.row_pacing import RowPacing
from workers.engines.talking import engine as talking_engine
from workers.engines.talking.engine import TalkingEngine
from workers.media.audio import encode_audio
from workers.media.encode import Origin
from workers.media.pixels import Audio, Pixels
from workers.media.video_files import VideoFiles
from workers.protocol.engine import Wait


@pytest.fixture(scope="module")
def engine() -> TalkingEngine:
    return engine_of()


def _sent(seed: int = 1, seconds: float = 1.0) -> list[bytes]:
    return [png(person(seed)[0]), wav(speech(seconds, seed).samples)]


def _completed(outcome: Outcome) -> Completed:
    assert isinstance(outcome, Completed), outcome
    return outcome


def _media(outcome: Outcome) -> list[Medium]:
    found = _completed(outcome).output["media"]
    return msgspec.convert(msgspec.to_builtins(found), list[Medium])


def test_a_portrait_and_a_recording_become_a_video_with_sound(engine: TalkingEngine) -> None:
    run = Run(engine, (job("a"), _sent(seconds=1.0)))

    outcome = _completed(run.finish()["a"])

    assert [(one.role, one.content_type) for one in _media(outcome)] == [
        ("output", "video/mp4"),
        ("thumbnail", "image/webp"),
        ("spritesheet", "image/webp"),
    ]
    video = _media(outcome)[0]
    assert (video.width, video.height, video.duration_ms, video.fps) == (160, 160, 1000, 25)
    assert (outcome.usage.video_ms, outcome.usage.steps) == (1000, 25)
    assert outcome.usage.attributes == {"resolution": "480p"}
    with av.open(io.BytesIO(outcome.files[0].data)) as container:
        (shown,), (heard,) = container.streams.video, container.streams.audio
        assert (shown.codec_context.name, heard.codec_context.name) == ("h264", "aac")
        assert shown.frames == 25
        assert heard.duration is not None
        assert heard.time_base is not None
        assert float(heard.duration * heard.time_base) == pytest.approx(1.0, abs=0.05)
    progress = [event for _, event in run.events if isinstance(event, Progress)]
    assert [one.step for one in progress] == sorted(one.step for one in progress)
    assert (progress[-1].step, progress[-1].steps) == (25, 25)


def test_audio_of_the_video_is_the_recording(engine: TalkingEngine) -> None:
    said = speech(1.2, 3).samples
    outcome = Run(engine, (job("a"), [png(person(3)[0]), wav(said)])).finish()["a"]

    with av.open(io.BytesIO(_completed(outcome).files[0].data)) as container:
        rate = container.streams.audio[0].codec_context.sample_rate
        parts = [frame.to_ndarray().mean(axis=0) for frame in container.decode(audio=0)]
    heard = np.concatenate(parts)
    loudness = [float(np.abs(heard[i : i + rate // 10]).mean()) for i in range(0, rate, rate // 10)]
    sent = [float(np.abs(said[i : i + 1600]).mean()) for i in range(0, 16000, 1600)]
    assert np.corrcoef(loudness, sent)[0, 1] > 0.98


def test_batched_requests_give_the_same_result_as_alone(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, each step could have one row, and so one request.
    monkeypatch.setattr(RowPacing, "rows", 4)
    # Before encoding, which lets a last bit grow.
    shown: dict[RequestId, list[Pixels]] = {}

    class KeptFrames(VideoFiles):
        def __init__(self, *arguments: Any, origin: Origin, **options: Any) -> None:
            super().__init__(*arguments, origin=origin, **options)
            self._shown = shown[origin.request_id] = []

        def add(self, frame: Pixels) -> None:
            self._shown.append(frame)
            super().add(frame)

    monkeypatch.setattr(talking_engine, "VideoFiles", KeptFrames)
    sent = {name: _sent(seed, seconds) for name, seed, seconds in (("a", 1, 0.9), ("b", 2, 0.5))}

    for name, files in sent.items():
        _completed(Run(engine, (job(f"{name} alone"), files)).finish()[f"{name} alone"])
    run = Run(engine, *((job(name), files) for name, files in sent.items()))
    together = run.finish()

    assert run.shared > 0
    for name in sent:
        one = np.stack(shown[RequestId(f"{name} alone")]).astype(int)
        other = np.stack(shown[RequestId(name)])
        assert one.shape == other.shape
        assert frames_of(_completed(together[name]).files[0].data).shape == one.shape
        # Batches of other sizes may round the last bit another way.
        difference = np.abs(one - other)
        assert difference.mean() < 0.05, np.unique(difference, return_counts=True)


def test_video_covers_a_recording_that_ends_within_a_frame(
    engine: TalkingEngine,
) -> None:
    sent = [png(person()[0]), wav(speech(1.0).samples[: 16 * 330])]

    free = Run(engine, (job("a", fps=10), sent)).finish()["a"]
    held = Run(engine, (job("b", fps=10, held_ms=390), sent)).finish()["b"]

    assert _media(free)[0].duration_ms == 400
    # Never more than was held for.
    assert _media(held)[0].duration_ms == 300


def test_large_portrait_is_scaled_down_with_its_aspect_ratio() -> None:
    engine = engine_of(side=96)
    tall = np.pad(person()[0], ((40, 0), (0, 0), (0, 0)), mode="edge")

    outcome = Run(engine, (job("a"), [png(tall), wav(speech(0.3).samples)])).finish()["a"]

    assert (_media(outcome)[0].width, _media(outcome)[0].height) == (78, 96)


def test_portrait_without_a_mouth_fails_only_its_request(engine: TalkingEngine) -> None:
    plain = np.full((120, 120, 3), (90, 140, 200), np.uint8)
    run = Run(
        engine, (job("a"), [png(plain), wav(speech(0.3).samples)]), (job("b"), _sent(seconds=0.3))
    )

    outcomes = run.finish()

    failed = outcomes["a"]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_input", "image")
    assert "No mouth" in failed.message
    assert isinstance(outcomes["b"], Completed)


def test_silence_does_not_change_the_portrait(engine: TalkingEngine) -> None:
    pixels, _ = person(4)
    outcome = Run(engine, (job("a"), [png(pixels), wav(np.zeros(8000, np.float32))])).finish()["a"]

    frames = frames_of(_completed(outcome).files[0].data).astype(int)

    # What remains is the codec's.
    assert np.abs(frames - frames[:1]).mean() < 0.3
    assert np.abs(frames - frames[:1]).max() < 32
    assert np.abs(frames[0] - pixels).mean() < 4


def test_cancelled_request_is_charged_for_its_frames_so_far(engine: TalkingEngine) -> None:
    run = Run(engine, (job("a"), _sent(seconds=2.0)), (job("b"), _sent(2, seconds=0.3)))
    while not engine._running[RequestId("a")].video.frames:
        run.step()
    engine.cancel(RequestId("a"), "client")

    outcomes = run.finish()

    cancelled = outcomes["a"]
    assert isinstance(cancelled, Cancelled)
    assert 0 < cancelled.usage.video_ms < 2000
    assert isinstance(outcomes["b"], Completed)


def test_request_cancelled_before_its_first_step_is_not_analysed(
    engine: TalkingEngine,
) -> None:
    run = Run(engine, (job("a"), _sent()))
    engine.cancel(RequestId("a"), "deadline")

    run.step()

    assert isinstance(run.outcomes["a"], Cancelled)


def test_request_without_a_free_slot_waits() -> None:
    engine = engine_of(slots=1)
    run = Run(engine, (job("a"), _sent(seconds=0.2)))

    assert isinstance(engine.admit(job("b"), Clock(), _sent(seconds=0.2)), Wait)
    run.finish()


@pytest.mark.parametrize(
    ("asked", "files", "code", "param"),
    [
        ({}, [], "invalid_input", "image"),
        ({}, [b""], "invalid_input", "audio"),
        ({}, [b"nothing", wav(np.zeros(800, np.float32))], "invalid_input", "image"),
        ({}, [png(person()[0]), b"nothing"], "invalid_input", "audio"),
        ({}, [png(person()[0]), wav(np.zeros(40_000, np.float32))], "invalid_input", "audio"),
        ({"fps": 61}, [png(person()[0]), b""], "unsupported_parameter", "fps"),
    ],
)
def test_invalid_inputs_are_refused_by_name(
    asked: dict[str, Any], files: list[bytes], code: str, param: str
) -> None:
    engine = engine_of(limits={"seconds": 2})

    refused = engine.admit(job("a", **asked), Clock(), files)

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == (code, param)


def test_stereo_stays_stereo(engine: TalkingEngine) -> None:
    left = speech(0.4).samples
    sound = encode_audio(Audio(np.stack([left, left * 0.2]), 16_000), "flac")

    outcome = Run(engine, (job("a"), [png(person()[0]), sound])).finish()["a"]

    with av.open(io.BytesIO(_completed(outcome).files[0].data)) as container:
        assert container.streams.audio[0].codec_context.channels == 2


@pytest.mark.parametrize(
    "options", [{"rows": 0}, {"side": 8}, {"fps": 0}, {"fps": 100}, {"dtype": "bfloat16"}, {"x": 1}]
)
def test_unsupported_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        engine_of(**options)


def test_checkpoint_of_another_architecture_is_refused() -> None:
    engine = TalkingEngine(
        ModelSpec("x", "talking-head", engine="talking", checkpoint="workers/pocket/upscale")
    )

    with pytest.raises(ValueError, match="architecture"):
        engine.load()
