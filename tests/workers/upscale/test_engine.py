"""Upscaling in a batch equals upscaling alone, and failures stay with their request."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.driving import Run
from tests.workers.llm.driver import Clock
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Failed,
    Job,
    Outcome,
    Progress,
    RequestId,
    Usage,
)
from workers.contract.media import ImageInput, Medium, VideoInput
from workers.contract.models import ModelSpec
from workers.engines.upscale.compact import Compact
from workers.engines.upscale.engine import UpscaleEngine
from workers.media import decode, encode
from workers.media.pixels import Audio, Pixels
from workers.protocol.engine import Wait

SCALE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compact network of random weights, which looks eight pixels far."""
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("upscale")
    save_file(Compact(width=8, depth=2, scale=SCALE).state_dict(), path / "model.safetensors")
    return path


def _engine(path: Path, *, limits: Any = None, **options: Any) -> UpscaleEngine:
    spec = ModelSpec(
        name="tiny",
        task="image-upscale",
        engine="upscale",
        checkpoint=str(path),
        options={"device": "cpu", "threads": 1, **options},
        limits=limits or {},
    )
    engine = UpscaleEngine(spec)
    engine.load()
    return engine


def _picture(width: int, height: int, channels: int = 3, seed: int = 1) -> Pixels:
    r = np.random.default_rng(seed)
    return r.integers(0, 256, (height, width, channels), dtype=np.uint8)


def _png(width: int, height: int, channels: int = 3, seed: int = 1) -> bytes:
    return encode.image(_picture(width, height, channels, seed), "png")


def _clip(count: int = 6, *, audio: Audio | None = None, format: Any = "mp4") -> bytes:
    frames = [np.full((24, 32, 3), 10 * place, np.uint8) for place in range(count)]
    return encode.video(frames, 12, format, audio=audio)


def _image_job(name: str, **asked: Any) -> Job:
    value = msgspec.to_builtins(ImageInput(**{"images": 1, **asked}))
    return Job(RequestId(name), "1", "tiny", "image-upscale", value, stream=True)


def _video_job(name: str, **asked: Any) -> Job:
    value = msgspec.to_builtins(VideoInput(**{"video": True, **asked}))
    return Job(RequestId(name), "1", "tiny", "video-upscale", value, stream=True)


def _media(outcome: Outcome) -> list[Medium]:
    assert isinstance(outcome, Completed), outcome
    return msgspec.convert(msgspec.to_builtins(outcome.output["media"]), list[Medium])


def _image(outcome: Outcome, index: int = 0, *, alpha: bool = False) -> Pixels:
    assert isinstance(outcome, Completed), outcome
    return decode.read_image(outcome.files[index].data, alpha=alpha)


def _whole(path: Path, image: Pixels) -> Pixels:
    """Run the network on the complete image."""
    model = Compact.from_weights(load_file(path / "model.safetensors"))
    low = torch.from_numpy(image.copy()).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        drawn = model(low)[0].clamp(0, 1).permute(1, 2, 0)
    return np.asarray((drawn * 255).round().byte())


def test_tiles_together_are_the_network_on_the_whole_picture(checkpoint: Path) -> None:
    engine = _engine(checkpoint, tile=48, overlap=16)

    outcome = Run(engine, (_image_job("a"), [_png(131, 77)])).finish()["a"]

    expected = _whole(checkpoint, _picture(131, 77))
    assert np.abs(_image(outcome).astype(int) - expected).max() <= 1
    assert outcome.usage.images == 1
    assert outcome.usage.steps == 4 * 2
    assert outcome.usage.attributes == {"size": "524x308"}
    (medium,) = _media(outcome)
    assert (medium.kind, medium.blob, medium.width, medium.height) == ("image", 0, 524, 308)


def test_a_tile_in_a_batch_is_the_tile_alone(checkpoint: Path) -> None:
    engine = _engine(checkpoint)
    network = engine._loaded
    assert network is not None
    tiles = np.stack([_picture(40, 30, seed=seed) for seed in range(5)])

    together = network.upscale(tiles)

    for tile, drawn in zip(tiles, together, strict=True):
        np.testing.assert_allclose(network.upscale(tile[None])[0], drawn, atol=1e-5, rtol=0)


def test_batched_requests_give_the_same_result_as_alone(checkpoint: Path) -> None:
    jobs = [
        (_image_job("a"), [_png(40, 40, seed=1)]),
        (_image_job("b"), [_png(40, 40, seed=2)]),
        (_image_job("c"), [_png(90, 70, seed=3)]),
        (_video_job("d"), [_clip()]),
    ]

    run = Run(_engine(checkpoint, tile=48, step_pixels=4 * 48 * 48), *jobs)
    together = run.finish()

    assert run.shared
    for job, files in jobs:
        alone = Run(_engine(checkpoint, tile=48), (job, files)).finish()[job.request_id]
        found = together[job.request_id]
        assert found.usage == alone.usage
        assert isinstance(found, Completed)
        assert isinstance(alone, Completed)
        if job.task == "image-upscale":
            assert np.abs(_image(found).astype(int) - _image(alone)).max() <= 1
        else:
            clips = [
                decode.read_video(one.files[0].data, frames_max=10, seconds_max=9).frames
                for one in (found, alone)
            ]
            assert np.abs(clips[0].astype(int) - clips[1]).max() <= 4


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({}, (120, 80)),
        ({"scale": 2}, (60, 40)),
        ({"scale": 3}, (90, 60)),
        ({"width": 45}, (45, 30)),
        ({"height": 80}, (120, 80)),
        ({"width": 31, "height": 21}, (31, 21)),
    ],
)
def test_sizes_below_the_networks_factor_are_supported(
    asked: Any, size: tuple[int, int], checkpoint: Path
) -> None:
    outcome = Run(_engine(checkpoint), (_image_job("a", **asked), [_png(30, 20)])).finish()["a"]

    assert _image(outcome).shape[1::-1] == size
    assert outcome.usage.attributes == {"size": f"{size[0]}x{size[1]}"}


@pytest.mark.parametrize("format", ["png", "webp", "jpeg"])
def test_transparency_is_kept_if_the_format_supports_it(format: Any, checkpoint: Path) -> None:
    image = _picture(30, 20, 4)
    image[..., 3] = 255
    image[:10, :, 3] = 0
    job = _image_job("a", format=format, compression=95)

    outcome = Run(_engine(checkpoint), (job, [encode.image(image, "png")])).finish()["a"]

    found = _image(outcome, alpha=True)
    assert found.shape == (80, 120, 3 if format == "jpeg" else 4)
    if format != "jpeg":
        assert (found[:36, :, 3] == 0).all()
        assert (found[44:, :, 3] == 255).all()


def test_several_images_of_one_request_are_several_outputs(checkpoint: Path) -> None:
    files = [_png(30, 20), _png(20, 20)]

    outcome = Run(_engine(checkpoint), (_image_job("a", images=2), files)).finish()["a"]

    assert [(medium.index, medium.blob, medium.width) for medium in _media(outcome)] == [
        (0, 0, 120),
        (1, 1, 80),
    ]
    assert outcome.usage.images == 2


def test_a_video_keeps_rate_length_and_sound(checkpoint: Path) -> None:
    tone = np.sin(np.arange(16_000) / 6, dtype=np.float32)[None] / 2
    clip = _clip(12, audio=Audio(tone, 16_000))

    outcome = Run(_engine(checkpoint), (_video_job("a"), [clip])).finish()["a"]

    video, thumbnail, sheet = _media(outcome)
    assert (video.kind, video.width, video.height) == ("video", 128, 96)
    assert (video.fps, video.duration_ms) == (12, 1000)
    assert (thumbnail.role, sheet.role) == ("thumbnail", "spritesheet")
    assert outcome.usage.video_ms == 1000
    assert outcome.usage.steps == 12
    assert outcome.usage.attributes == {"resolution": "480p"}
    assert isinstance(outcome, Completed)
    found = decode.read_video(outcome.files[0].data, frames_max=20, seconds_max=9, audio=True)
    assert found.frames.shape == (12, 96, 128, 3)
    assert found.audio is not None
    assert abs(found.audio.seconds - 1) < 0.2
    with av.open(io.BytesIO(outcome.files[0].data)) as container:
        assert '"model": "tiny"' in container.metadata["comment"]


def test_video_can_be_delivered_smaller_and_as_webp(checkpoint: Path) -> None:
    job = _video_job("a", scale=2, format="webp")

    outcome = Run(_engine(checkpoint), (job, [_clip(format="webp")])).finish()["a"]

    video = _media(outcome)[0]
    assert (video.content_type, video.width, video.height) == ("image/webp", 64, 48)


def test_progress_is_reported_step_by_step(checkpoint: Path) -> None:
    run = Run(_engine(checkpoint, step_pixels=1), (_video_job("a"), [_clip(6)]))

    run.finish()

    steps = [event for _, event in run.events]
    assert [(event.step, event.steps) for event in steps if isinstance(event, Progress)] == [
        (step, 6) for step in range(1, 7)
    ]
    assert isinstance(steps[-1], Progress)
    assert steps[-1].eta_ms == 0


@pytest.mark.usefixtures("single_layers")
def test_tiles_are_interrupted_between_convolutions(checkpoint: Path) -> None:
    engine = _engine(checkpoint)
    job = Job(RequestId("a"), "1", "tiny", "image-upscale", {"images": 1})
    run = Run(engine, (job, [_png(40, 30)]))
    run.step()
    assert not run.outcomes
    assert engine._call is not None

    outcome = run.finish()["a"]

    assert isinstance(outcome, Completed)
    whole = engine._model.upscale(_picture(40, 30)[None])[0]
    found = decode.read_image(outcome.files[0].data)
    assert np.abs(found - (whole * 255).round().clip(0, 255)).max() <= 1
    again = Run(engine, (msgspec.structs.replace(job, request_id=RequestId("b")), [_png(40, 30)]))
    again.step()
    call = engine._call
    assert call is not None
    engine.cancel(RequestId("b"), "client")
    again.step()
    assert isinstance(again.outcomes["b"], Cancelled)
    assert call._computation.dead


@pytest.mark.usefixtures("whole_calls")
def test_a_cancelled_request_ends_at_the_next_step(checkpoint: Path) -> None:
    run = Run(_engine(checkpoint, step_pixels=1), (_video_job("a"), [_clip(6)]))
    run.step()

    run.engine.cancel(RequestId("a"), "client")
    run.step()

    outcome = run.outcomes["a"]
    assert isinstance(outcome, Cancelled)
    assert outcome.usage.steps == 1


def _fail_above(engine: UpscaleEngine, too_much: Callable[[Any], bool]) -> list[int]:
    """Let memory run out for batches of which something is true; return sizes that were tried."""
    network = engine._loaded
    assert network is not None
    draw, tried = network.upscale, []

    def draw_or_fail(tiles: Any) -> Any:
        tried.append(len(tiles))
        if too_much(tiles):
            raise torch.OutOfMemoryError("out of memory")
        return draw(tiles)

    network.upscale = draw_or_fail  # type: ignore[method-assign]
    return tried


def test_too_large_a_batch_is_halved(checkpoint: Path) -> None:
    engine = _engine(checkpoint, step_pixels=8 * 400)
    tried = _fail_above(engine, lambda tiles: len(tiles) > 2)

    jobs = [(_image_job(str(n)), [_png(20, 20, seed=n)]) for n in range(8)]
    outcomes = Run(engine, *jobs).finish()

    assert all(isinstance(outcome, Completed) for outcome in outcomes.values())
    assert tried == [8, 4, 2, 2, 4, 2, 2]
    expected = _whole(checkpoint, _picture(20, 20, seed=5))
    assert np.abs(_image(outcomes["5"]).astype(int) - expected).max() <= 1


def test_only_a_request_too_large_by_itself_fails(checkpoint: Path) -> None:
    engine = _engine(checkpoint, step_pixels=8 * 400)
    _fail_above(engine, lambda tiles: bool((tiles == 255).all(axis=(1, 2, 3)).any()))
    white = encode.image(np.full((20, 20, 3), 255, np.uint8), "png")

    jobs = [(_image_job(str(n)), [_png(20, 20, seed=n)]) for n in range(3)]
    outcomes = Run(engine, *jobs, (_image_job("white"), [white])).finish()

    failed = outcomes.pop("white")
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"
    assert all(isinstance(outcome, Completed) for outcome in outcomes.values())


def test_damaged_video_fails_only_its_request(checkpoint: Path) -> None:
    frames = [_picture(32, 24, seed=seed) for seed in range(40)]
    clip = bytearray(encode.video(frames, 20))
    late = len(clip) * 3 // 4
    clip[late:] = bytes(len(clip) - late)
    jobs = [(_video_job("a"), [bytes(clip)]), (_image_job("b"), [_png(30, 20)])]

    outcomes = Run(_engine(checkpoint), *jobs).finish()

    failed = outcomes["a"]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_input", "video")
    assert isinstance(outcomes["b"], Completed)


@pytest.mark.parametrize(
    ("job", "files", "code", "said"),
    [
        (_image_job("a"), [], "invalid_input", "image to upscale is missing"),
        (_image_job("a"), [b"?"], "invalid_input", "not a supported image"),
        (_image_job("a"), [_png(101, 100)], "invalid_input", "10100 pixels; at most 10000"),
        (_image_job("a", n=2), [_png(9, 9)], "unsupported_parameter", "n is 2"),
        (_image_job("a", scale=8), [_png(9, 9)], "unsupported_parameter", "supports 1 to 4"),
        (_image_job("a", width=37), [_png(9, 9)], "unsupported_parameter", "at most 36x36"),
        (
            _image_job("a", width=30, height=20),
            [_png(9, 9)],
            "unsupported_parameter",
            "aspect ratio",
        ),
        (_video_job("a"), [], "invalid_input", "video to upscale is missing"),
        (_video_job("a"), [_png(9, 9)], "invalid_input", "not a supported video"),
        (_video_job("a"), [_clip(25)], "invalid_input", "2.1 seconds long; at most 2"),
        (_video_job("a", scale=5), [_clip(3)], "unsupported_parameter", "scale is 5"),
    ],
)
def test_unsupported_requests_are_refused_with_a_sentence(
    job: Job, files: list[bytes], code: str, said: str, checkpoint: Path
) -> None:
    engine = _engine(checkpoint, pixels_max=10_000, limits={"seconds": 2})

    refused = engine.admit(job, Clock(), files)

    assert isinstance(refused, Failed)
    assert refused.code == code
    assert said in refused.message


def test_a_video_longer_than_was_held_for_is_refused(checkpoint: Path) -> None:
    job = msgspec.structs.replace(_video_job("a"), limits=Usage(video_ms=400))

    refused = _engine(checkpoint).admit(job, Clock(), [_clip(6)])

    assert isinstance(refused, Failed)
    assert "0.5 seconds long; at most 0.4" in refused.message


def test_request_without_a_free_slot_waits(checkpoint: Path) -> None:
    engine = _engine(checkpoint, slots=1)
    engine.admit(_image_job("a"), Clock(), [_png(9, 9)])

    assert isinstance(engine.admit(_image_job("b"), Clock(), [_png(9, 9)]), Wait)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"tile": 20}, "tile is 20; with this overlap it must be at least 32"),
        ({"overlap": -1}, "overlap is -1"),
        ({"tyle": 9}, "options of the engine upscale are dtype, device"),
        ({"dtype": "float16"}, "float16 is many times slower"),
    ],
)
def test_unsupported_option_is_refused(options: Any, said: str, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=said):
        _engine(checkpoint, **options)


def test_weights_as_training_programs_wrap_them_are_read(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"params_ema": load_file(checkpoint / "model.safetensors")}, tmp_path / "net.pth")

    outcome = Run(_engine(tmp_path), (_image_job("a"), [_png(30, 20)])).finish()["a"]

    expected = _whole(checkpoint, _picture(30, 20))
    assert np.abs(_image(outcome).astype(int) - expected).max() <= 1


def test_checkpoints_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains no weights"):
        _engine(tmp_path)
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="spandrel"):
        _engine(tmp_path)
    (tmp_path / "more.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(
        ValueError, match=r"several files of weights: other\.safetensors, more\.pth"
    ):
        _engine(tmp_path)
    (tmp_path / "other.safetensors").unlink()
    with pytest.raises(ValueError, match=r"more\.pth cannot be read as weights"):
        _engine(tmp_path)


def test_bfloat16_is_close(checkpoint: Path) -> None:
    outcome = Run(_engine(checkpoint, dtype="bfloat16"), (_image_job("a"), [_png(30, 20)]))

    found = _image(outcome.finish()["a"]).astype(int)
    assert np.abs(found - _whole(checkpoint, _picture(30, 20))).mean() < 3
