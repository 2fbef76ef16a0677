"""The diffusion engine: outcomes, previews, masks, cancels, precision and refusals."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from greenlet import greenlet
from PIL import Image

from tests.workers.diffusion.driver import SIZE, Driver, opened, picture, spec
from workers.contract.jobs import Cancelled, Completed, Failed, Progress, Sketch
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import loading
from workers.engines.diffusion.options import read_options
from workers.protocol.engine import Wait

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def sd3(checkpoint: Make) -> Path:
    return checkpoint("StableDiffusion3Pipeline")


@pytest.fixture(scope="module")
def sd(checkpoint: Make) -> Path:
    return checkpoint("StableDiffusionPipeline")


def test_n_images_share_steps_and_have_separate_seeds(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("one", n=3, seed=7)
    driver.finish()
    outcome = driver.outcomes["one"]
    assert isinstance(outcome, Completed)
    assert [medium["seed"] for medium in outcome.output["media"]] == [7, 8, 9]
    assert outcome.usage.images == 3
    assert outcome.usage.steps == 12
    assert outcome.usage.attributes == {"size": "32x32"}
    assert len(set(driver.files("one"))) == 3
    assert driver.steps < 20
    driver.admit("again", seed=8)
    driver.finish()
    difference = np.abs(opened(driver.files("again")[0]) - opened(driver.files("one")[1]))
    assert difference.max() <= 1


def test_same_seed_gives_the_same_image_under_any_load(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("alone", seed=3)
    driver.finish()
    for index in range(5):
        driver.admit(f"other{index}", seed=100 + index, steps=3 + index)
    driver.step()
    driver.admit("crowded", seed=3)
    driver.finish()
    difference = np.abs(opened(driver.files("alone")[0]) - opened(driver.files("crowded")[0]))
    assert difference.max() <= 1


def test_step_weights_are_the_numbers_of_rows(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("guided", guidance=5.0)
    driver.admit("unguided", guidance=1.0)
    driver.admit("two", n=2, guidance=5.0)
    shares: list[dict[str, float]] = []
    while driver.open:
        shares.append(driver.step())
    assert {"guided": 2.0, "unguided": 1.0, "two": 4.0} in shares


def test_progress_and_previews_are_reported_during_generation(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("one", steps=6, previews=2)
    driver.finish()
    events = driver.events["one"]
    progress = [event for event in events if isinstance(event, Progress)]
    assert [(event.step, event.steps) for event in progress] == [(i, 6) for i in range(1, 7)]
    assert progress[0].eta_ms is not None
    assert progress[0].eta_ms > progress[-1].eta_ms == 0
    sketches = [event for event in events if isinstance(event, Sketch)]
    assert [sketch.index for sketch in sketches] == [0, 1]
    for sketch in sketches:
        assert opened(sketch.file.data).shape == (SIZE, SIZE, 3)


def test_cancelled_request_ends_immediately_and_others_continue(sd3: Path) -> None:
    driver = Driver(spec(sd3, slots=2))
    driver.admit("gone", steps=50)
    driver.admit("stays", steps=5)
    for _ in range(6):
        driver.step()
    driver.engine.cancel("gone", "client")
    driver.step()
    outcome = driver.outcomes["gone"]
    assert isinstance(outcome, Cancelled)
    assert 0 < outcome.usage.steps < 50
    assert not isinstance(driver.admit("next", steps=3), Wait), "the slot is free"
    driver.finish()
    assert isinstance(driver.outcomes["stays"], Completed)
    assert isinstance(driver.outcomes["next"], Completed)


def test_no_state_remains_after_the_only_request(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("gone", n=2, steps=50)
    for _ in range(6):
        driver.step()
    driver.engine.cancel("gone", "deadline")
    driver.step()
    gc.collect()
    courses = [one for one in gc.get_objects() if issubclass(type(one), greenlet) and one.parent]
    assert not any(courses), "greenlets that have not ended are true"


def test_unloading_frees_the_weights_of_a_model_that_has_served(sd3: Path) -> None:
    driver = Driver(spec(sd3))
    driver.admit("one")
    driver.finish()
    denoiser = weakref.ref(driver.engine._model.denoiser)

    driver.engine.unload()
    gc.collect()

    assert denoiser() is None


def test_request_without_a_free_slot_waits(sd3: Path) -> None:
    driver = Driver(spec(sd3, slots=2))
    driver.admit("one", n=3)
    assert isinstance(driver.admit("two"), Wait)
    driver.finish()
    driver.admit("two")
    driver.finish()
    assert isinstance(driver.outcomes["two"], Completed)


def test_urgent_requests_are_generated_first(sd3: Path) -> None:
    driver = Driver(spec(sd3, slots=8, rows=2))
    driver.admit("batch", steps=20, priority=-1)
    for _ in range(8):
        driver.step()
    driver.admit("urgent", steps=4)
    while "urgent" in driver.open:
        driver.step()
    assert "batch" in driver.open
    before = len([e for e in driver.events["batch"] if isinstance(e, Progress)])
    assert before < 10
    driver.finish()


def test_failed_image_does_not_affect_others(sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engines.diffusion import request

    to_pixels = request.to_pixels
    calls = []

    def fail_second(drawn: Any) -> Any:
        calls.append(drawn)
        if len(calls) == 2:
            return to_pixels(np.full_like(drawn, np.nan))
        return to_pixels(drawn)

    driver = Driver(spec(sd3))
    monkeypatch.setattr(request, "to_pixels", fail_second)
    driver.admit("one", n=3)
    driver.finish()
    outcome = driver.outcomes["one"]
    assert isinstance(outcome, Completed)
    assert outcome.usage.images == 2
    errors = [medium.get("error") for medium in outcome.output["media"]]
    assert sum(error is not None for error in errors) == 1
    assert "non-finite" in next(filter(None, errors))
    assert [m["blob"] for m in outcome.output["media"] if "blob" in m] == [0, 1]


def test_encoding_error_fails_only_its_request(sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engines.diffusion import engine

    image_file = engine.image_file

    def fail_one(pixels: Any, asked: Any, origin: Any) -> Any:
        if origin.request_id == "bad":
            raise OSError("the encoder broke")
        return image_file(pixels, asked, origin)

    driver = Driver(spec(sd3))
    monkeypatch.setattr(engine, "image_file", fail_one)
    driver.admit("bad")
    driver.admit("good")
    driver.finish()
    failed = driver.outcomes["bad"]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert "broke" not in failed.message
    assert isinstance(driver.outcomes["good"], Completed)


def test_out_of_memory_fails_only_the_request_that_does_not_fit(
    sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = spec(sd3)
    driver = Driver(of)
    assert driver.engine._loaded is not None
    denoiser = driver.engine._loaded.denoiser
    batcher = driver.engine._batcher
    forward = type(denoiser).forward.__get__(denoiser)
    largest = []

    def narrow(*args: Any, **kwargs: Any) -> Any:
        largest.append(len(kwargs["hidden_states"]))
        if kwargs["hidden_states"].shape[-1] > 16 or largest[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        return forward(*args, **kwargs)

    denoiser.forward = batcher.batch_point("transformer", narrow, "forward")
    driver.admit("small")
    driver.admit("other", seed=1)
    driver.admit("large", width=64, height=64)
    driver.finish()
    assert max(largest) == 4
    assert isinstance(driver.outcomes["small"], Completed)
    assert isinstance(driver.outcomes["other"], Completed)
    failed = driver.outcomes["large"]
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"


@pytest.mark.parametrize(("format", "said"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_output_formats_name_their_origin(sd3: Path, format: str, said: str) -> None:
    driver = Driver(spec(sd3))
    driver.admit("req_1", format=format, seed=5)
    driver.finish()
    image = Image.open(io.BytesIO(driver.files("req_1")[0]))
    assert image.format == said
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp")
    packet = packet.decode() if isinstance(packet, bytes) else packet
    assert packet is not None
    for value in ("painter", "req_1", '"5"'):
        assert value in packet


def test_video_has_the_requested_length(checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("LTXPipeline"), "text-to-video", fps=8))
    driver.admit("one", duration_ms=1500)
    driver.finish()
    outcome = driver.outcomes["one"]
    assert isinstance(outcome, Completed)
    video, thumbnail, sheet = outcome.files
    assert outcome.usage.video_ms == 1500
    assert [m.get("role", "output") for m in outcome.output["media"]] == [
        "output",
        "thumbnail",
        "spritesheet",
    ]
    with av.open(io.BytesIO(video.data)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 12
    assert (frames[0].width, frames[0].height) == (SIZE, SIZE)
    for still in (thumbnail, sheet):
        assert Image.open(io.BytesIO(still.data)).format == "WEBP"


@pytest.mark.parametrize("scheduler", ["ddim", "euler", "euler-ancestral", "dpm++", "unipc", "lcm"])
def test_schedulers_by_name(sd: Path, scheduler: str) -> None:
    driver = Driver(spec(sd))
    driver.admit("named", scheduler=scheduler, previews=1)
    driver.admit("own", scheduler="ddim", seed=1)
    driver.finish()
    assert opened(driver.files("named")[0]).std() > 0


@pytest.mark.parametrize("scheduler", ["euler", "dpm++", "unipc"])
def test_schedulers_of_flow_by_name(checkpoint: Make, scheduler: str) -> None:
    driver = Driver(spec(checkpoint("LTXPipeline"), "text-to-video", scheduler="euler"))
    driver.admit("one", duration_ms=1125, scheduler=scheduler)
    driver.finish()
    outcome = driver.outcomes["one"]
    assert isinstance(outcome, Completed | Failed)
    if scheduler == "euler":
        assert isinstance(outcome, Completed)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_precisions_give_nearly_the_same_image(sd3: Path, dtype: str) -> None:
    exact, rounded = Driver(spec(sd3)), Driver(spec(sd3, dtype=dtype))
    for driver in (exact, rounded):
        driver.admit("one", seed=4)
        driver.finish()
    far = np.abs(opened(exact.files("one")[0]) - opened(rounded.files("one")[0]))
    assert 0 < far.mean() < 12


def test_lora_changes_the_image(sd3: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3)
    torch.manual_seed(1)
    pipeline.transformer.add_adapter(
        LoraConfig(r=2, init_lora_weights=False, target_modules=["to_k", "to_q", "to_v"])
    )
    StableDiffusion3Pipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer)
    )
    plain = Driver(spec(sd3))
    adapted = Driver(spec(sd3, lora=[{"checkpoint": str(tmp_path), "scale": 4.0}]))
    nothing = Driver(spec(sd3, lora=[{"checkpoint": str(tmp_path), "scale": 0.0}]))
    for driver in (plain, adapted, nothing):
        driver.admit("one", seed=4)
        driver.finish()
    drawn = opened(plain.files("one")[0])
    assert np.abs(drawn - opened(adapted.files("one")[0])).max() > 3
    assert np.abs(drawn - opened(nothing.files("one")[0])).max() <= 1


@pytest.mark.parametrize(
    ("asked", "files", "param", "words"),
    [
        ({"width": 33}, 0, "size", "multiples of"),
        ({"scheduler": "magic"}, 0, "scheduler", "this model supports"),
        ({"scale": 4}, 0, "scale", "no upscaler"),
        ({"images": 1}, 1, "image", "at most 0 images"),
        ({"parameters": {"style": "x"}}, 0, "style", "no parameter style"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    sd3: Path, asked: dict[str, Any], files: int, param: str, words: str
) -> None:
    driver = Driver(spec(sd3))
    admission = driver.admit("one", [picture()] * files, **asked)
    if not isinstance(admission, Failed):
        driver.finish()
        outcome = driver.outcomes["one"]
        assert isinstance(outcome, Failed)
        admission = outcome
    assert admission.param == param
    assert words in admission.message
    assert not driver.engine._running


def test_invalid_image_is_a_client_error(sd: Path) -> None:
    driver = Driver(spec(sd, "image-to-image"))
    admission = driver.admit("one", [b"GIF89a nonsense"])
    assert isinstance(admission, Failed)
    assert admission.code == "invalid_input"
    assert not driver.engine._running


def test_a_strength_that_leaves_no_step_is_refused(sd: Path) -> None:
    driver = Driver(spec(sd, "image-to-image"))
    admission = driver.admit("one", [picture()], strength=0.1)
    assert isinstance(admission, Failed)
    assert admission.param == "strength"


def test_missing_safety_checker_is_an_error(sd: Path) -> None:
    of = spec(sd, safety=True)
    with pytest.raises(ValueError, match="safety is on, but the checkpoint has no safety checker"):
        loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"dtype": "float16", "device": "cpu"}, "many times slower"),
        ({"slots": 0}, "slots is 0"),
        ({"colour": "red"}, "options of the engine diffusion are"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(spec(tmp_path, **options))
