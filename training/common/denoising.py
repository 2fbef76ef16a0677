"""Creates, trains and saves the denoisers of ``pocket-image`` and ``pocket-video``.

They learn rectified flow with x-prediction, together with the text encoder, from batches that each
script renders. The result is a directory in diffusers' format, in bfloat16, with a running mean of
the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from PIL import Image
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from training.common.auxiliary_heads import AuxiliaryHeads
from training.common.loop import (
    TEXT,
    LabelledText,
    Mean,
    adam,
    clock,
    set_rate,
    step,
    train_text,
)
from workers.engines.diffusion.pocket_image import (
    COORDINATES,
    PocketPipeline,
    coordinates,
    encode_text,
)

SIDE: Final = 64
LATENTS: Final = 8
SCALE: Final = 4
TEXT_DROPOUT: Final = 0.1
"""Probability of an empty text, for classifier-free guidance."""
CHANGED: Final = 0.25
"""Difference from its source above which a latent pixel counts as changed."""
SMALL: Final = 0.03
"""Fraction of changed pixels up from which they weigh as much as all others together."""
HEADS_WEIGHT: Final = 0.2
"""Weight of the auxiliary heads' loss."""
SOFT: Final = 0.05
"""Bounds the weight of errors at low noise, where the text decides nothing any more."""
SAVED_S: Final = 480


# --- Parts ---------------------------------------------------------------------------------------


def make_unet(*, outputs: int, sources: int, width: int) -> Any:
    """Create a UNet that denoises ``outputs`` images together, conditioned on ``sources`` images.

    ``width`` is the number of channels of the outermost blocks.
    """
    return UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        in_channels=LATENTS * (outputs + sources) + COORDINATES,
        out_channels=LATENTS * outputs,
        block_out_channels=(width, 96, 128),
        down_block_types=(
            "DownBlock2D",
            "SimpleCrossAttnDownBlock2D",
            "SimpleCrossAttnDownBlock2D",
        ),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=TEXT,
        attention_head_dim=32,
        norm_num_groups=16,
        resnet_time_scale_shift="scale_shift",
        class_embed_type="projection",
        projection_class_embeddings_input_dim=TEXT,
    )


@torch.no_grad()
def encode(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images to latents ``(B, LATENTS, H, W)`` of unit variance."""
    with torch.autocast("cpu", torch.bfloat16):
        latents: torch.Tensor = vae.encode(pixels).latents.float()
    return (latents - float(vae.config.shift_factor)) * float(vae.config.scaling_factor)


# --- Training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as inputs and targets of the UNet."""

    target: torch.Tensor
    """Latents ``(B, C, H, W)`` to generate."""
    sources: torch.Tensor
    """Latents ``(B, S, H, W)`` of the source images."""
    texts: Sequence[str]
    weights: torch.Tensor
    """Weight of each latent pixel, ``(B, 1, H, W)``, see ``importance``."""
    instructed: torch.Tensor | None = None
    """Whether the text is an instruction, which determines the target at any noise: ``(B,)``."""
    classes: Sequence[Mapping[str, str]] = ()
    """Classes of each target, for ``AuxiliaryHeads``."""
    changed: torch.Tensor | None = None
    """Where an instruction changes the source: ``(B, 1, H, W)``, 0 or 1."""


def importance(apart: torch.Tensor) -> torch.Tensor:
    """Return the weight of each latent pixel, 1 on average: ``(B, 1, H, W)``.

    ``apart`` ``(B, 1, H, W)`` is its difference from what is known without the text. Changed pixels
    weigh as much as all others together, however few they are.
    """
    changed = (apart > CHANGED).float()
    share = changed.mean((1, 2, 3), keepdim=True)
    return torch.where(share > 0, 0.5 + 0.5 * changed / share.clamp(min=SMALL), 1.0)


def noise_levels(count: int) -> torch.Tensor:
    """Sample noise levels from 0 to 1, mostly those at which the text decides the result."""
    broad = torch.randn(count) * 1.2
    where = torch.rand(count)
    sigma = torch.sigmoid(torch.where(where < 0.7, torch.randn(count) * 0.8 + 1.0, broad))
    return torch.where(where > 0.9, 1 - 0.05 * torch.rand(count), sigma)


def train_unet(
    pipe: PocketPipeline,
    next_batch: Callable[[], Batch],
    minutes: float,
    r: random.Random,
    save: Callable[[str], None],
    *,
    rate: float,
    compiled: bool,
    heads: AuxiliaryHeads | None = None,
    blind: bool = False,
) -> None:
    """Train rectified flow, and save a running mean of the weights.

    ``blind``: train at full noise only.
    """
    unet, encoder = pipe.unet, pipe.text_encoder
    unet.to(memory_format=torch.channels_last)
    learned = [*unet.parameters(), *encoder.parameters()]
    mean = Mean(learned)
    denoise = torch.compile(unet) if compiled else unet
    optimizer = adam((unet.parameters(), rate), (encoder.parameters(), rate * 0.2))
    if heads is not None:
        optimizer.add_param_group({"params": [*heads.parameters()], "initial_lr": 2 * rate})
    place = coordinates(SIDE // SCALE, SIDE // SCALE)
    turns, total, saved = 0, 0.0, time.monotonic()
    for done in clock(minutes):
        set_rate(optimizer, done)
        batch = next_batch()
        target, size = batch.target, len(batch.texts)
        texts = ["" if r.random() < TEXT_DROPOUT else text for text in batch.texts]
        sigma = noise_levels(size)
        if batch.instructed is not None:
            early = batch.instructed & (torch.rand(size) < 0.5)
            sigma = torch.where(early, 0.7 + 0.3 * torch.rand(size), sigma)
        if blind:
            sigma = torch.ones(size)
        wide = sigma[:, None, None, None]
        noisy = (1 - wide) * target + wide * torch.randn_like(target)
        seen = torch.cat([noisy, batch.sources, place.expand(size, -1, -1, -1)], 1)
        with torch.autocast("cpu", torch.bfloat16):
            states, mask, summary = encode_text(pipe.tokenizer, encoder, texts)
            made = denoise(
                seen.contiguous(memory_format=torch.channels_last),
                sigma * 1000,
                encoder_hidden_states=states,
                encoder_attention_mask=mask,
                class_labels=summary,
            ).sample
        far = ((made.float() - target) ** 2 * batch.weights).mean((1, 2, 3))
        loss = (far / (sigma**2 + SOFT)).mean()
        if heads is not None and batch.changed is not None and batch.instructed is not None:
            loss = loss + HEADS_WEIGHT * heads.loss(batch.classes, batch.changed, batch.instructed)
        step(optimizer, learned, loss)
        mean.update()
        turns, total = turns + 1, total + float(loss.detach())
        if turns % 200 == 0:
            print(f"unet {done:.3f} step {turns} loss {total / 200:.4f}", flush=True)
            total = 0.0
        if time.monotonic() - saved > SAVED_S:
            mean.swap()
            save(f"{done:.3f}")
            mean.swap()
            saved = time.monotonic()
    mean.swap()


# --- Scripts -------------------------------------------------------------------------------------


def arguments(description: str | None, *stages: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=stages, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--compile", action="store_true", help="compile the UNet: a sixth faster after two minutes"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser


def seeded(seed: int) -> random.Random:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return random.Random(seed)


def text_stage(
    tokenizer: Any,
    encoder: Any,
    fields: Mapping[str, Sequence[str]],
    choose: Callable[[random.Random], LabelledText],
    options: argparse.Namespace,
    r: random.Random,
) -> None:
    train_text(tokenizer, encoder, fields, choose, minutes=options.minutes, r=r)
    tokenizer.save_pretrained(options.out / "tokenizer")
    encoder.save_pretrained(options.out / "text_encoder")


def unet_stage(
    kind: type[PocketPipeline],
    vae: Any,
    unet: Any,
    next_batch: Callable[[], Batch],
    show: Callable[[Any, Path], None],
    options: argparse.Namespace,
    r: random.Random,
    *,
    heads: AuxiliaryHeads | None = None,
    blind: bool = False,
) -> None:
    """Train, and save periodically, each time with a contact sheet beside the directory."""
    out: Path = options.out
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    vae.requires_grad_(requires_grad=False)
    pipe = kind(vae, read(out, "text_encoder"), read(out, "tokenizer"), unet, scheduler)
    pipe.set_progress_bar_config(disable=True)
    count = sum(one.numel() for one in unet.parameters())
    print(f"unet {count / 1e6:.2f} M", flush=True)

    def save(note: str) -> None:
        save_pipeline(pipe, out)
        show(pipe, out.parent / f"{out.name}-{note}.png")
        print(f"saved at {note}", flush=True)

    train_unet(
        pipe,
        next_batch,
        options.minutes,
        r,
        save,
        rate=options.rate,
        compiled=options.compile,
        heads=heads,
        blind=blind,
    )
    save("last")


def save_pipeline(pipe: Any, out: Path) -> None:
    """Write the directory in bfloat16; the pipeline keeps its float32 weights for training."""
    pipe.save_pretrained(out, safe_serialization=True)
    for part in ("unet", "text_encoder", "vae"):
        module = getattr(pipe, part)
        state = {name: one.clone() for name, one in module.state_dict().items()}
        module.to(torch.bfloat16).save_pretrained(out / part)
        module.to(torch.float32).load_state_dict(state)
    index = out / "model_index.json"
    fields = json.loads(index.read_text())
    fields["_class_name"] = type(pipe).__name__
    index.write_text(json.dumps(fields, indent=2) + "\n")


def read(out: Path, part: str) -> Any:
    classes: dict[str, Any] = {
        "vae": AutoencoderTiny,
        "unet": UNet2DConditionModel,
        "text_encoder": T5EncoderModel,
        "tokenizer": PreTrainedTokenizerFast,
    }
    found = classes[part].from_pretrained(out / part)
    return found if part == "tokenizer" else found.to(torch.float32)


def as_image(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
