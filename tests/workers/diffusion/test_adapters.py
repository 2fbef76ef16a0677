"""LoRA adapters by request: each result is that of the library's pipeline with this adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from tests.workers.diffusion.driver import SIZE, Driver, opened, spec
from workers.contract.jobs import Failed
from workers.engines.diffusion.engine import DiffusionEngine

Make = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
DENOISERS = {"StableDiffusionXLPipeline": "unet", "FluxPipeline": "transformer"}


def _pipeline(kind: str, path: Path) -> Any:
    pipeline = getattr(diffusers, kind).from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> dict[str, dict[str, Path]]:
    """Two adapters for each pipeline."""
    made: dict[str, dict[str, Path]] = {}
    for kind, part in DENOISERS.items():
        made[kind] = {}
        for seed, name in enumerate(("oils", "ink.2")):
            pipeline = _pipeline(kind, checkpoint(kind))
            torch.manual_seed(seed)
            network = getattr(pipeline, part)
            network.add_adapter(
                LoraConfig(r=2, init_lora_weights=False, target_modules=["to_k", "to_q", "to_v"])
            )
            path = tmp_path_factory.mktemp("lora")
            layers = {f"{part}_lora_layers": get_peft_model_state_dict(network)}
            type(pipeline).save_lora_weights(path, **layers)
            made[kind][name] = path
    return made


def _listed(of: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {name: {"checkpoint": str(path), "scale_max": 8.0, **more} for name, path in of.items()}


@pytest.mark.parametrize("kind", DENOISERS)
def test_results_are_those_of_the_pipeline_with_the_same_adapters(
    kind: str, checkpoint: Make, loras: dict[str, dict[str, Path]]
) -> None:
    driver = Driver(spec(checkpoint(kind), adapters=_listed(loras[kind]), steps=2))
    requests: dict[str, dict[str, float]] = {
        "plain": {},
        "oils": {"oils": 6.0},
        "ink": {"ink.2": 8.0},
        "both": {"oils": 4.0, "ink.2": 7.5},
        "plain again": {},
    }

    for name, chosen in requests.items():
        driver.admit(name, seed=3, guidance=5.0, adapters=chosen)
    driver.finish()

    stock = _pipeline(kind, checkpoint(kind))
    for one, path in loras[kind].items():
        stock.load_lora_weights(str(path), adapter_name=one[:3])
    for name, chosen in requests.items():
        stock.enable_lora() if chosen else stock.disable_lora()
        if chosen:
            stock.set_adapters([one[:3] for one in chosen], [*chosen.values()])
        image = stock(
            prompt="a red circle",
            width=SIZE,
            height=SIZE,
            num_inference_steps=2,
            guidance_scale=5.0,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        ).images[0]
        drawn = opened(driver.files(name)[0])
        assert np.abs(drawn - (image * 255).round()).max() <= 1, name
    drawn = {name: opened(driver.files(name)[0]) for name in requests}
    assert np.abs(drawn["oils"] - drawn["ink"]).max() > 3


def test_requests_share_a_batch_only_with_the_same_adapters(
    checkpoint: Make, loras: dict[str, dict[str, Path]]
) -> None:
    kind = "FluxPipeline"
    driver = Driver(spec(checkpoint(kind), adapters=_listed(loras[kind]), steps=2))
    for name in ("a", "b", "c", "d"):
        driver.admit(name, adapters={"oils": 1.0} if name in "ab" else {"oils": 0.5})

    together: set[frozenset[str]] = set()
    while driver.open:
        together.add(frozenset(driver.step()))

    assert frozenset("abcd") in together, "they do not share the encoders"
    assert {frozenset("ab"), frozenset("cd")} <= together


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"water": 1.0}, "'water' is not an adapter; this model has oils, ink.2"),
        ({"oils": 8.5}, "the scale of oils is 8.5; it can be 0 to 8"),
    ],
)
def test_adapter_that_is_not_listed_or_too_strong_is_refused(
    chosen: dict[str, float], words: str, checkpoint: Make, loras: dict[str, dict[str, Path]]
) -> None:
    kind = "FluxPipeline"
    driver = Driver(spec(checkpoint(kind), adapters=_listed(loras[kind])))

    refused = driver.admit("one", adapters=chosen)

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("invalid_input", "adapters")
    assert words in refused.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapters": {"a": {"checkpoint": "nowhere"}}}, "the LoRA nowhere does not exist"),
        ({"adapters": {"a": {"checkpoint": ".", "scale": 2}}}, "adapters.a.scale is 2"),
        ({"adapters": {"a": {"checkpoint": "."}}, "dtype": "int8"}, "16 or 32 bits"),
    ],
)
def test_adapters_that_cannot_be_served_are_named_to_the_operator(
    options: dict[str, Any], words: str, checkpoint: Make
) -> None:
    with pytest.raises(ValueError, match=words):
        DiffusionEngine(spec(checkpoint("FluxPipeline"), **options)).load()
