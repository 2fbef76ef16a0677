"""Trains ``pocket-image`` on scenes and instructions: a small autoencoder, a text encoder, a UNet.

    for stage in text:10 vae:10 unet:120; do
        python -m workers.pocket.train_image --stage ${stage%:*} --minutes ${stage#*:} --out DIR
    done

Three stages; the last goes on from what the directory holds. The autoencoder learns to draw
scenes from latents of a sixteenth of their pixels. The text encoder learns to say what a caption or
an instruction means, so that the UNet need not find that out from pictures. The UNet then learns
rectified flow with x-prediction on all tasks at once. The result is a directory in diffusers'
format, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from PIL import Image
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from workers.pocket.captions import FIELDS, Lesson, lesson
from workers.pocket.pictures import (
    COORDINATES,
    SOURCES,
    PocketImagePipeline,
    coordinates,
    encode_text,
)
from workers.pocket.scenes import Scene, draw, scene, sheet
from workers.pocket.training import (
    TEXT,
    Mean,
    adam,
    clock,
    make_text_encoder,
    make_tokenizer,
    set_rate,
    step,
    train_text,
)

SIDE: Final = 64
LATENTS: Final = 8
SCALE: Final = 4
UNTOLD: Final = 0.1
"""How often the text is left out, so that guidance has something to guide away from."""
SOFT: Final = 0.05
"""Bounds the weight of errors at little noise, where there is nothing left to decide."""


# --- Parts ---------------------------------------------------------------------------------------


def make_vae() -> Any:
    return AutoencoderTiny(
        encoder_block_out_channels=(16, 16, 16),
        decoder_block_out_channels=(32, 32, 32),
        latent_channels=LATENTS,
        num_encoder_blocks=(1, 1, 2),
        num_decoder_blocks=(2, 1, 1),
    )


def make_unet() -> Any:
    return UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        in_channels=LATENTS * (1 + SOURCES) + COORDINATES,
        out_channels=LATENTS,
        block_out_channels=(64, 96, 128),
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


# --- Stages --------------------------------------------------------------------------------------


def slopes(pixels: torch.Tensor) -> torch.Tensor:
    """Differences between neighbours: a blurred edge differs in them most."""
    across = pixels[..., :, 1:] - pixels[..., :, :-1]
    down = pixels[..., 1:, :] - pixels[..., :-1, :]
    return torch.cat([across.flatten(1), down.flatten(1)], 1)


def train_vae(
    vae: Any, minutes: float, r: random.Random, *, rate: float, decoder_only: bool
) -> None:
    """Learn to draw scenes again from latents of unit variance, with some noise in them.

    With ``decoder_only`` the latents stay as they are, and so does what was learned on them.
    """
    vae.to(memory_format=torch.channels_last)
    vae.encoder.requires_grad_(not decoder_only)
    learned = [one for one in vae.parameters() if one.requires_grad]
    optimizer = adam((learned, rate))
    seen = total = 0.0
    for done in clock(minutes):
        set_rate(optimizer, done)
        pixels = draw([scene(r, plain=0.3) for _ in range(16)], SIDE)
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(pixels).latents
            noisy = latents + torch.randn_like(latents) * 0.08
            made = vae.decode(noisy).sample
        made = made.float()
        loss = F.l1_loss(made, pixels) + 2 * F.l1_loss(slopes(made), slopes(pixels))
        latents = latents.float()
        spread = latents.std((0, 2, 3))
        loss = (
            loss + 0.02 * ((spread - 1) ** 2).mean() + 0.02 * (latents.mean((0, 2, 3)) ** 2).mean()
        )
        step(optimizer, learned, loss)
        seen, total = seen + 1, total + float(loss.detach())
        if seen % 200 == 0:
            print(f"vae {done:.2f} loss {total / 200:.4f}", flush=True)
            total = 0.0
    with torch.no_grad():
        pixels = draw([scene(r, plain=0.3) for _ in range(64)], SIDE)
        latents = vae.encode(pixels).latents
        made = vae.decode(latents).sample.clamp(-1, 1)
        psnr = 10 * torch.log10(4 / ((made - pixels) ** 2).mean((1, 2, 3))).mean()
    print(f"vae psnr {psnr:.2f} dB, latents {latents.mean():.3f} ± {latents.std():.3f}", flush=True)
    if decoder_only:
        return
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )


class Batch:
    """Lessons as the UNet sees them: latents of target and sources, texts."""

    def __init__(self, vae: Any, lessons: list[Lesson]) -> None:
        pictures: list[Scene] = [one.target for one in lessons]
        places: list[tuple[int, int]] = []
        for row, one in enumerate(lessons):
            for number, source in enumerate(one.sources):
                places.append((row, number))
                pictures.append(source)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(draw(pictures, SIDE)).latents.float()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        self.target = latents[: len(lessons)]
        self.sources = torch.zeros(len(lessons), SOURCES, *self.target.shape[1:])
        for (row, number), latent in zip(places, latents[len(lessons) :], strict=True):
            self.sources[row, number] = latent
        self.texts = [one.text for one in lessons]


def noise_levels(count: int) -> torch.Tensor:
    """From 0 to 1, most of them where the text decides what the noise is to become."""
    broad = torch.randn(count) * 1.2
    where = torch.rand(count)
    sigma = torch.sigmoid(torch.where(where < 0.7, torch.randn(count) * 0.8 + 1.0, broad))
    return torch.where(where > 0.9, 1 - 0.05 * torch.rand(count), sigma)


def train_unet(
    pipe: PocketImagePipeline,
    minutes: float,
    r: random.Random,
    save: Callable[[str], None],
    *,
    rate: float,
    drawing: float,
) -> None:
    """Learn rectified flow on all tasks; keep a mean of the weights, which is what is saved."""
    unet, encoder, vae = pipe.unet, pipe.text_encoder, pipe.vae
    vae.requires_grad_(requires_grad=False)
    unet.to(memory_format=torch.channels_last)
    learned = [*unet.parameters(), *encoder.parameters()]
    mean = Mean(learned)
    optimizer = adam((unet.parameters(), rate), (encoder.parameters(), rate * 0.2))
    place = coordinates(SIDE // SCALE, SIDE // SCALE)
    turns, total, saved = 0, 0.0, time.monotonic()
    for done in clock(minutes):
        set_rate(optimizer, done)
        batch = Batch(vae, [lesson(r, drawing=drawing) for _ in range(32)])
        size = len(batch.texts)
        texts = ["" if r.random() < UNTOLD else text for text in batch.texts]
        sigma = noise_levels(size)
        wide = sigma[:, None, None, None]
        noisy = (1 - wide) * batch.target + wide * torch.randn_like(batch.target)
        seen = torch.cat([noisy, batch.sources.flatten(1, 2), place.expand(size, -1, -1, -1)], 1)
        with torch.autocast("cpu", torch.bfloat16):
            states, mask, summary = encode_text(pipe.tokenizer, encoder, texts)
            made = unet(
                seen.contiguous(memory_format=torch.channels_last),
                sigma * 1000,
                encoder_hidden_states=states,
                encoder_attention_mask=mask,
                class_labels=summary,
            ).sample
        far = ((made.float() - batch.target) ** 2).mean((1, 2, 3))
        loss = (far / (sigma**2 + SOFT)).mean()
        step(optimizer, learned, loss)
        turns, total = turns + 1, total + float(loss.detach())
        mean.update()
        if turns % 200 == 0:
            print(f"unet {done:.3f} step {turns} loss {total / 200:.4f}", flush=True)
            total = 0.0
        if time.monotonic() - saved > 480:
            mean.exchange()
            save(f"{done:.3f}")
            mean.exchange()
            saved = time.monotonic()
    mean.exchange()


# --- The whole -----------------------------------------------------------------------------------


def save_pipeline(pipe: Any, out: Path) -> None:
    """Write the directory in bfloat16, beside the weights that training goes on with."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=("text", "vae", "decoder", "unet"), required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--drawing", type=float, default=0.55, help="part of the lessons that bring no picture"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    r = random.Random(options.seed)
    out: Path = options.out
    if options.stage == "text":
        tokenizer = make_tokenizer(lambda r: lesson(r).text)
        encoder = make_text_encoder(len(tokenizer))
        train_text(tokenizer, encoder, FIELDS, lesson, minutes=options.minutes, r=r)
        tokenizer.save_pretrained(out / "tokenizer")
        encoder.save_pretrained(out / "text_encoder")
        return
    if options.stage in ("vae", "decoder"):
        vae = read(out, "vae") if (out / "vae").exists() else make_vae()
        only = options.stage == "decoder"
        train_vae(vae, options.minutes, r, rate=2 * options.rate, decoder_only=only)
        vae.to(torch.bfloat16).save_pretrained(out / "vae")
        return
    unet = read(out, "unet") if (out / "unet").exists() else make_unet()
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    parts = [read(out, part) for part in ("vae", "text_encoder", "tokenizer")]
    vae, encoder, tokenizer = parts
    pipe = PocketImagePipeline(vae, encoder, tokenizer, unet, scheduler)
    pipe.set_progress_bar_config(disable=True)
    count = sum(one.numel() for one in unet.parameters())
    print(f"unet {count / 1e6:.2f} M", flush=True)

    def save(note: str) -> None:
        save_pipeline(pipe, out)
        show(pipe, out.parent / f"{out.name}-{note}.png")
        print(f"saved at {note}", flush=True)

    train_unet(pipe, options.minutes, r, save, rate=options.rate, drawing=options.drawing)
    save("last")


def show(pipe: PocketImagePipeline, path: Path) -> None:
    """Draw a page of lessons: source, answer, and what would be right."""
    r = random.Random(12345)
    rows = []
    for index in range(24):
        one = lesson(r, drawing=0.5)
        sources = [as_image(draw([source], SIDE)) for source in one.sources]
        made = pipe(
            one.text,
            sources or None,
            generator=torch.Generator().manual_seed(index),
            output_type="pt",
        ).images
        blank = torch.ones(1, 3, SIDE, SIDE)
        first = draw([one.sources[0]], SIDE) if one.sources else blank
        rows += [first, made * 2 - 1, draw([one.target], SIDE)]
    Image.fromarray(sheet(torch.cat(rows), 12).numpy()).save(path)


def as_image(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


if __name__ == "__main__":
    main()
