"""``tollgate plan``: tables, the same numbers as JSON, errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.here import run_here
from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "plan.md"
DIMENSIONS = ("--params", "70e9", "--layers", "80", "--kv-heads", "8", "--head-dim", "128")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLGATE_HOME", str(tmp_path / "home"))


def run(*arguments: str, status: int = 0, **variables: str) -> str:
    done = run_here(("plan", *arguments), variables)
    assert done.exit_code == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def plan(*arguments: str, **variables: Any) -> Any:
    return json.loads(run(*arguments, "--json", **variables))


def test_model_described_by_its_dimensions_needs_no_catalog_or_database(
    tmp_path: Path,
) -> None:
    made = plan(
        "ours", *DIMENSIONS, "--dtype", "fp8", "--gpu", "h200", "--gpu-hour-usd", "3.2",
        TOLLGATE_CATALOG=str(tmp_path / "none.yaml"),
    )  # fmt: skip

    assert made["weight_bytes"] == 70_000_000_000
    assert made["request"]["kv_bytes_per_token"] == 327_680
    [device] = made["devices"]
    text = device["text"]
    assert (device["name"], device["fits"], text["sequences"]) == ("H200 SXM", True, 21)
    # (70 GB + 8 times 2.684 GB) a step of 8 tokens; $3.20 for an hour of 419.8 tokens per second.
    assert round(text["decode_tokens_per_s"], 1) == 419.8
    cost = text["usd_per_million_output_tokens"]
    assert (cost["roofline"], cost["expected"], cost["margin_percent"]) == (
        "2.1175",
        "4.2349",
        None,
    )


def test_plan_of_a_catalog_entry_includes_its_price() -> None:
    made = plan("pocket-chat", "--gpu", "l4", "--gpu", "H100", TOLLGATE_GPU_HOUR_USD="0.80")

    assert made["source"].startswith("counted in ")
    assert made["request"]["context"] == 1024
    assert [device["name"] for device in made["devices"]] == ["L4", "H100 SXM"]
    for device in made["devices"]:
        cost = device["text"]["usd_per_million_output_tokens"]
        assert cost["catalog"] == "0.0800"
        margin = 100 * (0.08 - float(cost["expected"])) / 0.08
        assert abs(cost["margin_percent"] - margin) < 0.1
        assert device["result"]["basis"] == "computed"
        assert float(device["result"]["price_usd"]) > 0


def test_entry_is_found_in_any_case() -> None:
    assert float(plan("Pocket-Chat", "--gpu", "l4")["devices"][0]["result"]["price_usd"]) > 0


def test_prices_of_hours_are_those_of_the_catalog(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.yaml"
    text = (ROOT / "catalog.yaml").read_text().replace("workers/", f"{ROOT}/workers/")
    catalog.write_text('gpu_hours: {L4: "0.80", cpu: "0.05"}\n' + text)

    made = plan("pocket-image", TOLLGATE_CATALOG=str(catalog), TOLLGATE_GPU_HOUR_USD="3.00")

    hours = {device["name"]: device["hour_usd"] for device in made["devices"]}
    assert (hours["L4"], hours["H200 SXM"], hours["CPU here"]) == ("0.8", "3", "0.05")


def test_all_known_devices_are_listed_by_default() -> None:
    text = run("meta-llama/Llama-3.3-70B-Instruct", "--dtype", "fp8")

    for said in (
        "70,553,706,496 weights, 80 layers, 8 KV heads of 128 (a shape",
        "70.55 GB of weights",
        "H100 SXM   80 GB     no, needs 2",
        "A100 80GB",
        "RTX 5090",
        "CPU here",
        "its bandwidth is measured",
        "upper bounds",
        "--gpu-hour-usd",
    ):
        assert said in text


def test_a_picture_takes_its_steps_twice_with_guidance() -> None:
    made = plan("sdxl", "--gpu", "h200", "--steps", "30", "--guidance", "5", "--price", "3.6")

    parts = {part["name"]: part for part in made["parts"]}
    assert (parts["unet"]["runs"], parts["vae"]["runs"]) == (60, 1)
    work = sum(part["operations"] * part["runs"] for part in parts.values())
    result = made["devices"][0]["result"]
    # Half of 989 TFLOP/s; the encoders' weights take longer to read than to multiply.
    assert result["device_seconds"] == pytest.approx(2 * work / 989e12, rel=0.01)
    assert float(result["cost_usd"]) == pytest.approx(result["device_seconds"] / 1000, rel=0.05)
    once = plan("sdxl", "--gpu", "h200", "--steps", "30", "--guidance", "1")
    assert once["parts"][0]["runs"] == 30


def test_devices_are_counted_for_a_load_in_groups_that_hold_the_model() -> None:
    made = plan(
        "deepseek-v3", "--dtype", "fp8", "--memory", "180", "--bandwidth", "8000",
        "--tflops", "4500", "--price", "5", "--per-second", "10",
    )  # fmt: skip

    [device] = made["devices"]
    assert (device["name"], device["devices_needed"]) == ("own GPU", 5)
    needed = 10 * device["result"]["device_seconds"]
    assert device["result"]["devices"] % 5 == 0
    assert needed <= device["result"]["devices"] < needed + 5
    daily = plan("sdxl", "--gpu", "h200", "--per-day", "86400")
    assert daily["results_per_second"] == 1


@pytest.mark.parametrize(
    ("model", "order"),
    [
        ("pocket-image", "64x64, 4 steps with guidance 1.5"),
        ("pocket-video", "64x64, 16 frames, 8 steps with guidance 1.5"),
        ("pocket-upscale", "512x512"),
        ("pocket-speech", "30 s"),
        ("pocket-music", "20 s"),
        ("wan2.1-t2v-14b", "832x480, 80 frames, 50 steps with guidance 5"),
        ("musicgen-medium", "30 s"),
        ("csm-1b", "30 s"),
        (str(ROOT / "workers" / "pocket" / "image"), "512x512, 30 steps with guidance 5"),
    ],
)
def test_media_are_planned_for_a_usual_result(model: str, order: str) -> None:
    text = run(model, "--gpu", "l4")

    assert f"a result of {order}\n" in text
    assert ("computed" in text.partition("one result:")[2]) == (model != "pocket-music")
    assert ("Measure it: tollgate try pocket-music." in text) == (model == "pocket-music")


def test_directory_is_planned_from_its_files() -> None:
    made = plan(str(ROOT / "workers" / "pocket" / "chat"), "--gpu", "l4", "--dtype", "int8")

    assert made["weight_bytes"] == made["shape"]["parameters"]
    assert made["devices"][0]["text"]["usd_per_million_input_tokens"] is None


def test_invalid_arguments_are_refused_in_one_line() -> None:
    assert "known are H100 SXM, H200 SXM" in run("pocket-chat", "--gpu", "b300", status=1)
    assert "known models are llama-2-7b" in run("nobody-knows-it", status=1)
    assert "kv-heads, head-dim is required" in run(
        "x", "--params", "7B", "--layers", "32", status=1
    )
    assert "'Veo3' is a model of unknown size" in run("Veo3", status=1)
    assert "plan its steps instead: pocket-speech" in run("pocket-talking-head", status=1)
    assert "is not a whole number" in run("x", "--params", "7.5", status=2)
    assert "bandwidth, tflops is required" in run("sdxl", "--memory", "80", status=1)
    assert "write width and height" in run("sdxl", "--size", "large", status=1)
    assert "not both" in run("sdxl", "--per-day", "1", "--per-second", "1", status=2)
    assert "longer than the context of 10" in run(
        "llama-2-7b", "--context", "10", "--input", "20", status=1
    )


def test_outputs_in_the_guide_are_those_of_its_commands() -> None:
    compared = 0
    for block in blocks(GUIDE, "console"):
        command, _, output = block.text.removeprefix("$ tollgate plan ").partition("\n")
        if output:
            assert run(*command.split()) == output, command
            compared += 1
    assert compared >= 3


def test_h200_serves_llama_2_70b_about_twice_as_fast_as_h100() -> None:
    made = plan(
        "llama-2-70b", "--gpu", "h100", "--gpu", "h200", "--dtype", "fp8", "--kv-dtype", "fp8",
        "--input", "2048", "--output", "128", "--batch", "18",
    )  # fmt: skip

    h100, h200 = made["devices"]
    # Beside the weights, an H100 has room for so many; an H200 for far more.
    assert (h100["text"]["sequences"], h200["text"]["sequences"]) == (8, 162)
    ratio = h200["result"]["results_per_second"] / h100["result"]["results_per_second"]
    assert round(ratio, 1) == 1.9
    [more] = plan(
        "llama-2-70b", "--gpu", "h200", "--dtype", "fp8", "--kv-dtype", "fp8",
        "--input", "2048", "--output", "128", "--batch", "32",
    )["devices"]  # fmt: skip
    # NVIDIA measured 303 output tokens per second with TensorRT-LLM 0.5.
    assert round(128 * more["result"]["results_per_second"]) == 305
    assert (
        round(more["result"]["results_per_second"] / h100["result"]["results_per_second"], 1) == 2.3
    )


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['tollgate', 'plan', 'pocket-chat', "
        "'--gpu', 'l4']; import gateway.__main__; gateway.__main__.main()"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
