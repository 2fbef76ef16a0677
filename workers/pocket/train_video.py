r"""Trains ``pocket-video`` on moving scenes, with the autoencoder of ``pocket-image``.

    for stage in text:8 unet:120; do
        python -m workers.pocket.train_video --stage ${stage%:*} --minutes ${stage#*:} \
            --image workers/pocket/image --out DIR
    done

Both parts begin with what those of the image model have learned. The text encoder learns what a
text says of motion; the UNet then learns rectified flow on the frames of a clip side by side on
channels, half of the time with the first frame given.
The result is a directory in diffusers' format, in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from PIL import Image

from workers.pocket.clips import FIELDS, FRAMES, Clip, clip, film
from workers.pocket.films import PocketVideoPipeline
from workers.pocket.pictures import COORDINATES, coordinates, encode_text
from workers.pocket.scenes import sheet
from workers.pocket.train_image import (
    LATENTS,
    SCALE,
    SIDE,
    SOFT,
    as_image,
    noise_levels,
    read,
    save_pipeline,
)
from workers.pocket.training import (
    TEXT,
    Mean,
    adam,
    clock,
    make_text_encoder,
    make_tokenizer,
    set_rate,
    step,
    take_over,
    train_text,
)

CLIPS: Final = 24
UNTOLD: Final = 0.1


def make_unet() -> Any:
    return UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        in_channels=LATENTS * (FRAMES + 1) + COORDINATES,
        out_channels=LATENTS * FRAMES,
        block_out_channels=(96, 96, 128),
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
def encode(vae: Any, clips: list[Clip]) -> torch.Tensor:
    """Draw clips and read their latents: (B, FRAMES, LATENTS, H, W), of unit variance."""
    frames = film(clips, SIDE)
    with torch.autocast("cpu", torch.bfloat16):
        latents: torch.Tensor = vae.encode(frames.flatten(0, 1)).latents.float()
    latents = (latents - float(vae.config.shift_factor)) * float(vae.config.scaling_factor)
    return latents.view(*frames.shape[:2], *latents.shape[1:])


def train_unet(
    pipe: PocketVideoPipeline,
    minutes: float,
    r: random.Random,
    save: Callable[[str], None],
    *,
    rate: float,
) -> None:
    unet, encoder, vae = pipe.unet, pipe.text_encoder, pipe.vae
    vae.requires_grad_(requires_grad=False)
    unet.to(memory_format=torch.channels_last)
    learned = [*unet.parameters(), *encoder.parameters()]
    mean = Mean(learned)
    optimizer = adam((unet.parameters(), rate), (encoder.parameters(), rate * 0.2))
    place = coordinates(SIDE // SCALE, SIDE // SCALE).expand(CLIPS, -1, -1, -1)
    turns, total, saved = 0, 0.0, time.monotonic()
    for done in clock(minutes):
        set_rate(optimizer, done)
        clips = [clip(r) for _ in range(CLIPS)]
        target = encode(vae, clips)
        pictured = torch.tensor([one.pictured for one in clips])[:, None, None, None]
        first = target[:, 0] * pictured
        target = target.flatten(1, 2)
        texts = ["" if r.random() < UNTOLD else one.text for one in clips]
        sigma = noise_levels(CLIPS)
        wide = sigma[:, None, None, None]
        noisy = (1 - wide) * target + wide * torch.randn_like(target)
        seen = torch.cat([noisy, first, place], 1)
        with torch.autocast("cpu", torch.bfloat16):
            states, mask, summary = encode_text(pipe.tokenizer, encoder, texts)
            made = unet(
                seen.contiguous(memory_format=torch.channels_last),
                sigma * 1000,
                encoder_hidden_states=states,
                encoder_attention_mask=mask,
                class_labels=summary,
            ).sample
        far = ((made.float() - target) ** 2).mean((1, 2, 3))
        loss = (far / (sigma**2 + SOFT)).mean()
        step(optimizer, learned, loss)
        mean.update()
        turns, total = turns + 1, total + float(loss.detach())
        if turns % 200 == 0:
            print(f"unet {done:.3f} step {turns} loss {total / 200:.4f}", flush=True)
            total = 0.0
        if time.monotonic() - saved > 480:
            mean.exchange()
            save(f"{done:.3f}")
            mean.exchange()
            saved = time.monotonic()
    mean.exchange()


def show(pipe: PocketVideoPipeline, path: Path) -> None:
    """Draw a page of clips, every third frame; each below what would be right."""
    r = random.Random(12345)
    rows = []
    for index in range(8):
        one = clip(r)
        right = film([one], SIDE)[0]
        picture = as_image(right[:1]) if one.pictured else None
        made = pipe(
            one.text, picture, generator=torch.Generator().manual_seed(index), output_type="pt"
        ).frames[0]
        rows += [right[::3], made[::3] * 2 - 1]
    Image.fromarray(sheet(torch.cat(rows), 12).numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--image", type=Path, required=True, help="the image model")
    parser.add_argument("--stage", choices=("text", "unet"), required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    r = random.Random(options.seed)
    out: Path = options.out
    if options.stage == "text":
        words = read(options.image, "tokenizer").get_vocab()
        known = sorted(words, key=words.__getitem__)
        tokenizer = make_tokenizer(lambda r: clip(r).text, known)
        encoder = make_text_encoder(len(tokenizer))
        print(f"taken over: {take_over(encoder, read(options.image, 'text_encoder')):.2f}")
        train_text(tokenizer, encoder, FIELDS, clip, minutes=options.minutes, r=r)
        tokenizer.save_pretrained(out / "tokenizer")
        encoder.save_pretrained(out / "text_encoder")
        return
    if (out / "unet").exists():
        unet = read(out, "unet")
    else:
        unet = make_unet()
        print(f"taken over: {take_over(unet, read(options.image, 'unet')):.2f}", flush=True)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    vae = read(options.image, "vae")
    pipe = PocketVideoPipeline(
        vae, read(out, "text_encoder"), read(out, "tokenizer"), unet, scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    count = sum(one.numel() for one in unet.parameters())
    print(f"unet {count / 1e6:.2f} M", flush=True)

    def save(note: str) -> None:
        save_pipeline(pipe, out)
        show(pipe, out.parent / f"{out.name}-{note}.png")
        print(f"saved at {note}", flush=True)

    train_unet(pipe, options.minutes, r, save, rate=options.rate)
    save("last")


if __name__ == "__main__":
    main()
