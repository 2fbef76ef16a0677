"""``tollgate plan``: tables, the same numbers as JSON, errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.here import run_here

ROOT = Path(__file__).parents[2]
DIMENSIONS = ("--params", "70e9", "--layers", "80", "--kv-heads", "8", "--head-dim", "128")


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
        TOLLGATE_CATALOG=str(tmp_path / "none.yaml"), TOLLGATE_HOME=str(tmp_path / "home"),
    )  # fmt: skip

    assert made["weight_bytes"] == 70_000_000_000
    assert made["kv_bytes_per_token"] == 327_680
    [device] = made["devices"]
    assert (device["name"], device["fits"], device["sequences"]) == ("H200 SXM", True, 21)
    # (70 GB + 8 times 2.684 GB) a step of 8 tokens; $3.20 for an hour of 419.8 tokens per second.
    assert round(device["decode_tokens_per_s"], 1) == 419.8
    cost = device["usd_per_million_output_tokens"]
    assert (cost["roofline"], cost["expected"], cost["margin_percent"]) == (
        "2.1175",
        "4.2349",
        None,
    )


def test_plan_of_a_catalog_entry_includes_its_price() -> None:
    made = plan("pocket-chat", "--gpu", "l4", "--gpu", "H100", TOLLGATE_GPU_HOUR_USD="0.80")

    assert made["shape"]["source"].startswith("counted in ")
    assert made["load"]["context"] == 1024
    assert [device["name"] for device in made["devices"]] == ["L4", "H100 SXM"]
    for device in made["devices"]:
        cost = device["usd_per_million_output_tokens"]
        assert cost["catalog"] == "0.0800"
        margin = 100 * (0.08 - float(cost["expected"])) / 0.08
        assert abs(cost["margin_percent"] - margin) < 0.1


def test_all_known_devices_are_listed_by_default() -> None:
    text = run("meta-llama/Llama-3.3-70B-Instruct", "--dtype", "fp8")

    for said in (
        "70,553,706,496 weights, 80 layers, 8 KV heads of 128 (a shape",
        "70.55 GB of weights",
        "H100 SXM   80 GB     no, needs 2",
        "A100 80GB",
        "CPU here",
        "its bandwidth is measured",
        "upper bounds",
        "--gpu-hour-usd",
    ):
        assert said in text


def test_directory_is_planned_from_its_files() -> None:
    made = plan(str(ROOT / "workers" / "pocket" / "chat"), "--gpu", "l4", "--dtype", "int8")

    assert made["weight_bytes"] == made["shape"]["parameters"]
    assert made["devices"][0]["usd_per_million_input_tokens"] is None


def test_invalid_arguments_are_refused_in_one_line() -> None:
    assert "known are H100 SXM, H200 SXM" in run("pocket-chat", "--gpu", "b300", status=1)
    assert "known models are llama-3.1-8b" in run("nobody-knows-it", status=1)
    assert "--kv-heads, --head-dim is required" in run(
        "x", "--params", "7B", "--layers", "32", status=1
    )
    assert "plans are for text-generation" in run("Veo3", status=1)
    assert "is not a whole number" in run("x", "--params", "7.5", status=2)


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['tollgate', 'plan', 'pocket-chat', "
        "'--gpu', 'l4']; import gateway.__main__; gateway.__main__.main()"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
