"""``tollgate catalog check --deep``: each mistake that only the checkpoint shows, by its entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.catalog.schema import CatalogEntry
from gateway.commands.planning.deep_check import inspection_findings
from tests.cli.here import run_here
from workers.contract.trials import Inspection

POCKET = Path(__file__).parents[2] / "workers" / "pocket"
CHAT = POCKET / "chat"


def _entry(name: str, checkpoint: Path | str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": "text-generation",
        "engine": "llm",
        "checkpoint": str(checkpoint),
        "limits": {"context_tokens": 256, "output_tokens": 64},
        "price": [{"unit": "request", "amount": "0.1"}],
        **fields,
    }


def _copy(path: Path, source: Path, *, without: str = "", **config: Any) -> Path:
    """Link the files of a checkpoint, with changes to its configuration."""
    path.mkdir()
    for file in source.iterdir():
        if file.name not in (without, "config.json"):
            (path / file.name).symlink_to(file)
    document = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, **config}))
    return path


def test_what_cannot_be_loaded_is_an_error_that_names_the_entry(tmp_path: Path) -> None:
    gpt2 = _copy(tmp_path / "gpt2", CHAT, architectures=["GPT2LMHeadModel"])
    base = _copy(tmp_path / "base", CHAT, without="chat_template.jinja")
    picture = {"task": "text-to-image", "engine": "diffusion", "limits": {}}
    limits = {"context_tokens": 4096, "output_tokens": 64}
    entries = [
        _entry("nowhere", tmp_path / "nowhere"),
        _entry("hub", "Qwen/Qwen3-0.6B"),
        _entry("gpt2", gpt2),
        _entry("long", CHAT, limits=limits),
        _entry("base", base),
        _entry("int4", CHAT, options={"dtype": "int4"}),
        _entry("cuda", CHAT, options={"device": "cuda"}),
        _entry("large", CHAT, options={"cache_tokens": 10**12}),
        _entry("good", CHAT),
        _entry("image", CHAT, **picture),
        _entry("upscaled", POCKET / "image", **picture, options={"upscaler": "up"}),
        _entry("adapted", POCKET / "image", **picture, options={"lora": [{"checkpoint": "lo"}]}),
        _entry("speech", CHAT, task="text-to-speech", engine="speech", limits={"characters": 9}),
        _entry("music", CHAT, task="text-to-music", engine="music", limits={"seconds": 9}),
        _entry("vectors", CHAT, task="text-embedding", engine="embedding", limits={}),
        _entry("echo", CHAT, engine="echo", options={"slots": "many"}),
    ]
    file = tmp_path / "catalog.yaml"
    file.write_text(yaml.safe_dump({"models": entries}))

    done = run_here(
        ("catalog", "check", "--deep", "--json", str(file)), {"CUDA_VISIBLE_DEVICES": ""}
    )

    found = {one["model"]: one for one in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert "good" not in found, found
    for model, said in {
        "nowhere": "nowhere does not exist",
        "hub": "hf download OWNER/NAME",
        "gpt2": "unsupported model family GPT2LMHeadModel",
        "long": "limits.context_tokens is 4096, but the model supports 1024 positions",
        "base": "no chat template: it serves completions",
        "int4": "dtype is int4, but the weights are not stored in four bits",
        "cuda": "torch finds no CUDA device",
        "large": "of weights), but cpu has",
        "image": "has no model_index.json",
        "upscaled": "the upscaler: ",
        "adapted": "lo does not exist",
        "speech": "unsupported model type 'qwen3'",
        "music": "not a music checkpoint",
        "echo": "invalid options",
    }.items():
        assert said in found[model]["message"], model
    assert found["base"]["level"] == "warning"
    assert {found[model]["level"] for model in ("nowhere", "int4", "large")} == {"error"}
    assert found["hub"]["line"] > found["nowhere"]["line"] > 0


@pytest.mark.parametrize(("memory", "count"), [(10**6, 1), (10**9, 0), (None, 0)])
def test_weights_are_compared_with_the_memory_of_the_device(memory: int | None, count: int) -> None:
    entry = CatalogEntry.model_validate(_entry("chat", CHAT))

    found = list(inspection_findings(entry, Inspection("chat", None, (), "L4", memory), POCKET))

    assert len(found) == count
