"""Control and reference pictures: each result is that of the library's pipeline with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from tests.workers.diffusion.checkpoints import make_control_network
from tests.workers.diffusion.driver import SIZE, Driver, opened, picture, spec
from workers.contract.jobs import Completed, Failed
from workers.engines.diffusion.engine import DiffusionEngine

Make = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")
KINDS = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "FluxPipeline")
ALWAYS = "StableDiffusionXLPipeline"
DTYPES = ("float32", "bfloat16")
TOLERANCES = {"float32": 1.0, "bfloat16": 2.0}
"""Mean difference of 255; in float32 the largest one. The order of sums depends on the rows."""
EMBEDDING = 16
EACH = [
    pytest.param(
        kind, dtype, marks=() if kind == ALWAYS or dtype == "float32" else pytest.mark.long
    )
    for kind in KINDS
    for dtype in DTYPES
]


def _denoiser(pipeline: Any) -> Any:
    return getattr(pipeline, "unet", None) or pipeline.transformer


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> Callable[[str], Path]:
    """A control network for each pipeline."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("control")
            made[kind] = make_control_network(kind, checkpoint(kind), folder)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> Callable[[str], Path]:
    """An IP-Adapter for each pipeline, with an image encoder beside it."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            denoiser = _denoiser(getattr(diffusers, kind).from_pretrained(checkpoint(kind)))
            folder = tmp_path_factory.mktemp("reference")
            torch.manual_seed(2)
            encoder = CLIPVisionModelWithProjection(
                CLIPVisionConfig(
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    image_size=32,
                    patch_size=16,
                    projection_dim=EMBEDDING,
                )
            )
            encoder.save_pretrained(folder / "image_encoder")
            save_file(_adapter(denoiser), folder / "adapter.safetensors")
            made[kind] = folder / "adapter.safetensors"
        return made[kind]

    return make


def _adapter(denoiser: Any) -> dict[str, torch.Tensor]:
    """Return random weights in the format of the published IP-Adapters."""
    flux = not hasattr(denoiser, "down_blocks")
    width = denoiser.config.joint_attention_dim if flux else denoiser.config.cross_attention_dim
    weights = {
        "image_proj.proj.weight": torch.randn(4 * width, EMBEDDING),
        "image_proj.proj.bias": torch.randn(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    names = [
        name
        for name in denoiser.attn_processors
        if not name.startswith("single_transformer_blocks")
    ]
    for index, name in enumerate(names):
        if not flux and name.endswith("attn1.processor"):
            continue
        attention = denoiser.get_submodule(name.removesuffix(".processor"))
        inner = attention.to_q.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"ip_adapter.{index}.{part}.weight"] = torch.randn(inner, width)
            if flux:
                weights[f"ip_adapter.{index}.{part}.bias"] = torch.randn(inner)
    return weights


def _listed(network: Path) -> dict[str, Any]:
    return {"edges": {"checkpoint": str(network), "strength": 0.5, "strength_max": 2.0}}


def _stock(kind: str, path: Path, dtype: str, **more: Any) -> Any:
    pipeline = getattr(diffusers, kind).from_pretrained(path, dtype=getattr(torch, dtype), **more)
    pipeline.set_progress_bar_config(disable=True)
    vae = pipeline.vae
    if getattr(vae.config, "force_upcast", False) and hasattr(pipeline, "upcast_vae"):
        vae.to(torch.float32)
        vae.register_to_config(force_upcast=False)
        decode = vae.decode
        vae.decode = lambda latents, *args, **kwargs: decode(latents.float(), *args, **kwargs)
    return pipeline


def _run(pipeline: Any, seed: int, **arguments: Any) -> np.ndarray:
    image = pipeline(
        prompt="a red circle",
        width=SIZE,
        height=SIZE,
        num_inference_steps=2,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **arguments,
    ).images[0]
    return (image * 255).round()


def _near(drawn: np.ndarray, stock: np.ndarray, dtype: str) -> bool:
    difference = np.abs(drawn - stock)
    return (difference.max() if dtype == "float32" else difference.mean()) <= TOLERANCES[dtype]


def _image(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(opened(picture(seed, (SIZE, SIZE))).astype(np.uint8))


@pytest.mark.parametrize(("kind", "dtype"), EACH)
def test_controlled_results_are_those_of_the_pipeline(
    kind: str, dtype: str, checkpoint: Make, networks: Make
) -> None:
    driver = Driver(spec(checkpoint(kind), controls=_listed(networks(kind)), steps=2, dtype=dtype))
    strengths = {"default": None, "strong": 1.5, "none": 0.0}

    for index, (name, strength) in enumerate(strengths.items()):
        asked = {} if strength is None else {"control_strength": strength}
        file = picture(index, (SIZE, SIZE))
        driver.admit(name, [file], seed=3, guidance=5.0, images=0, control="edges", **asked)
    driver.admit("plain", seed=3, guidance=5.0)
    rows: list[int] = []
    while driver.open:
        rows.append(len(driver.step()))

    assert max(rows) >= 3, "requests of different strengths share the batches of the network"
    network: Any = diffusers.FluxControlNetModel if "Flux" in kind else diffusers.ControlNetModel
    controlled = _stock(
        kind.replace("Pipeline", "ControlNetPipeline"),
        checkpoint(kind),
        dtype,
        controlnet=network.from_pretrained(networks(kind), dtype=getattr(torch, dtype)),
    )
    argument = "control_image" if "Flux" in kind else "image"
    for index, (name, strength) in enumerate(strengths.items()):
        stock = _run(
            controlled,
            3,
            **{argument: _image(index)},
            controlnet_conditioning_scale=0.5 if strength is None else strength,
        )
        assert _near(opened(driver.files(name)[0]), stock, dtype), name
    plain = _run(_stock(kind, checkpoint(kind), dtype), 3)
    assert _near(opened(driver.files("plain")[0]), plain, dtype)
    assert np.abs(opened(driver.files("strong")[0]) - plain).mean() > 3


@pytest.mark.parametrize(("kind", "dtype"), EACH)
def test_results_with_a_reference_are_those_of_the_pipeline(
    kind: str, dtype: str, checkpoint: Make, references: Make
) -> None:
    reference = {"checkpoint": str(references(kind)), "strength": 0.6, "strength_max": 2.0}
    driver = Driver(spec(checkpoint(kind), reference=reference, steps=2, dtype=dtype))
    requests: dict[str, float | None] = {"one": 0.6, "other": 0.6, "strong": 2.0}

    driver.admit("plain", seed=3, guidance=5.0)
    for index, (name, strength) in enumerate(requests.items()):
        driver.admit(
            name,
            [picture(index, (SIZE, SIZE))],
            seed=3,
            guidance=5.0,
            images=0,
            reference=True,
            reference_strength=strength,
        )
    driver.admit("plain again", seed=3, guidance=5.0)
    together: set[frozenset[str]] = set()
    while driver.open:
        together.add(frozenset(driver.step()))

    assert {frozenset(("one", "other")), frozenset(("plain", "plain again"))} <= together
    stock = _stock(kind, checkpoint(kind), dtype)
    plain = _run(stock, 3)
    path = references(kind)
    encoder = CLIPVisionModelWithProjection.from_pretrained(
        path.parent / "image_encoder", dtype=getattr(torch, dtype)
    )
    stock.register_modules(image_encoder=encoder)
    stock.load_ip_adapter(
        str(path.parent), subfolder="", weight_name=path.name, low_cpu_mem_usage=False
    )
    _denoiser(stock).encoder_hid_proj.to(getattr(torch, dtype))
    for index, (name, strength) in enumerate(requests.items()):
        stock.set_ip_adapter_scale(strength)
        expected = _run(stock, 3, ip_adapter_image=_image(index))
        assert _near(opened(driver.files(name)[0]), expected, dtype), name
    for name in ("plain", "plain again"):
        assert _near(opened(driver.files(name)[0]), plain, dtype)
    assert np.abs(opened(driver.files("strong")[0]) - plain).mean() > 1


@pytest.mark.parametrize(
    "kind",
    [
        "StableDiffusionXLPipeline",
        pytest.param("StableDiffusionPipeline", marks=pytest.mark.long),
    ],
)
def test_sources_masks_and_both_guides_go_together(
    kind: str, checkpoint: Make, networks: Make, references: Make
) -> None:
    reference = {"checkpoint": str(references(kind))}
    of = spec(
        checkpoint(kind),
        "image-to-image",
        controls=_listed(networks(kind)),
        reference=reference,
    )
    driver = Driver(of)
    files = [picture(seed, (SIZE, SIZE)) for seed in range(3)]

    driver.admit("plain", files[:1], seed=1, images=1)
    driver.admit("both", files, seed=1, images=1, control="edges", reference=True)
    mask = picture(7, (SIZE, SIZE))
    driver.admit(
        "masked",
        [files[0], mask, *files[1:]],
        seed=1,
        images=1,
        mask=True,
        control="edges",
        reference=True,
    )
    driver.finish()

    assert all(isinstance(outcome, Completed) for outcome in driver.outcomes.values())
    plain, both = (opened(driver.files(name)[0]) for name in ("plain", "both"))
    assert np.abs(plain - both).mean() > 1


def test_guides_that_the_library_has_no_pipeline_for_are_refused(
    checkpoint: Make, networks: Make, references: Make
) -> None:
    kind = "FluxPipeline"
    reference = {"checkpoint": str(references(kind))}
    of = spec(
        *(checkpoint(kind), "text-to-image", "image-to-image"),
        controls=_listed(networks(kind)),
        reference=reference,
    )
    driver = Driver(of)
    files = [picture(seed, (SIZE, SIZE)) for seed in range(3)]

    driver.admit("without a source", files[:2], images=0, control="edges", reference=True)
    refused = driver.admit(
        "with one", files, task="image-to-image", images=1, control="edges", reference=True
    )
    driver.finish()

    assert isinstance(driver.outcomes["without a source"], Completed)
    assert isinstance(refused, Failed)
    assert refused.param == "reference_image"
    assert "no reference image beside a control picture in this task" in refused.message


@pytest.mark.parametrize(
    ("asked", "code", "param", "words"),
    [
        ({"control": "depth"}, "invalid_input", "control", "'depth' is not a control network"),
        (
            {"control": "edges", "control_strength": 2.5},
            "invalid_input",
            "control_strength",
            "control_strength is 2.5; it can be 0 to 2",
        ),
        ({"reference": True}, "unsupported_parameter", "reference_image", "no reference image"),
    ],
)
def test_guide_that_is_not_listed_or_too_strong_is_refused(
    asked: dict[str, Any], code: str, param: str, words: str, checkpoint: Make, networks: Make
) -> None:
    kind = "FluxPipeline"
    driver = Driver(spec(checkpoint(kind), controls=_listed(networks(kind))))

    refused = driver.admit("one", [picture()], images=0, **asked)

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == (code, param)
    assert words in refused.message


def test_unreadable_control_picture_is_refused(checkpoint: Make, networks: Make) -> None:
    kind = "FluxPipeline"
    driver = Driver(spec(checkpoint(kind), controls=_listed(networks(kind))))

    refused = driver.admit("one", [b"nothing"], images=0, control="edges")

    assert isinstance(refused, Failed)
    assert refused.param == "control_image"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            "FluxPipeline",
            {"controls": {"edges": {"checkpoint": "nowhere"}}},
            r"the control network edges has no config\.json in nowhere",
        ),
        (
            "FluxPipeline",
            {"controls": {"edges": {"checkpoint": ".", "strength": 2.0}}},
            r"controls\.edges\.strength is 2",
        ),
        (
            "FluxPipeline",
            {"reference": {"checkpoint": "nowhere.safetensors"}},
            r"nowhere\.safetensors of the reference \(IP-Adapter\) does not exist",
        ),
    ],
)
def test_guides_that_cannot_be_served_are_named_to_the_operator(
    kind: str, options: dict[str, Any], words: str, checkpoint: Make
) -> None:
    with pytest.raises(ValueError, match=words):
        DiffusionEngine(spec(checkpoint(kind), **options)).load()


def test_pipeline_without_control_networks_is_refused(checkpoint: Make, networks: Make) -> None:
    controls = _listed(networks("FluxPipeline"))
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline does not support control"):
        DiffusionEngine(spec(checkpoint("StableDiffusion3Pipeline"), controls=controls)).load()


def test_memory_of_guides_is_part_of_the_demand(
    checkpoint: Make, networks: Make, references: Make
) -> None:
    kind = "FluxPipeline"
    plain = DiffusionEngine(spec(checkpoint(kind))).demand().bytes

    guided = DiffusionEngine(
        spec(
            checkpoint(kind),
            controls=_listed(networks(kind)),
            reference={"checkpoint": str(references(kind))},
        )
    ).demand()

    assert guided.bytes > plain
