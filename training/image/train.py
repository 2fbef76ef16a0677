"""Trains ``pocket-image`` on scenes and instructions: a small autoencoder, a text encoder, a UNet.

    for stage in text:10 vae:30 meant:30 unet:120; do
        python -m training.image.train --stage ${stage%:*} --minutes ${stage#*:} --out DIR
    done

Four stages; each continues from what the directory contains. The autoencoder learns to reconstruct
scenes from latents of a sixteenth of their pixels. The text encoder learns to classify captions and
instructions, so that the UNet need not learn that from images. The UNet first learns at full noise
which thing, and of which image, an instruction means, and then rectified flow with x-prediction on
all tasks. The result is a directory in diffusers' format, in bfloat16.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny
from PIL import Image

from training.common.auxiliary_heads import AuxiliaryHeads, classes_of, scene_classes
from training.common.captions import Sample, fields
from training.common.denoising import (
    CHANGED,
    LATENTS,
    SIDE,
    Batch,
    arguments,
    as_image,
    encode,
    importance,
    make_unet,
    read,
    seeded,
    text_stage,
    unet_stage,
)
from training.common.loop import (
    adam,
    clock,
    copy_weights,
    make_text_encoder,
    make_tokenizer,
    set_rate,
    step,
)
from training.common.samples import WORLDS, choose_ambiguous, choose_sample
from training.common.scenes import SHIPPED, Scene, World, draw, light_of, scene, sheet
from workers.engines.diffusion.pocket_image import SOURCES, PocketImagePipeline


def make_vae() -> Any:
    return AutoencoderTiny(
        encoder_block_out_channels=(16, 16, 16),
        decoder_block_out_channels=(32, 32, 32),
        latent_channels=LATENTS,
        num_encoder_blocks=(1, 1, 2),
        num_decoder_blocks=(2, 1, 1),
    )


def slopes(pixels: torch.Tensor) -> torch.Tensor:
    """Return differences between neighbouring pixels, in which blurred edges differ most."""
    across = pixels[..., :, 1:] - pixels[..., :, :-1]
    down = pixels[..., 1:, :] - pixels[..., :-1, :]
    return torch.cat([across.flatten(1), down.flatten(1)], 1)


def train_vae(
    vae: Any, minutes: float, r: random.Random, *, rate: float, decoder_only: bool, world: World
) -> None:
    """Learn to reconstruct scenes from latents of unit variance with some noise.

    Errors weigh more in the dark, or small dark things would be lost. With ``decoder_only`` the
    latents do not change, so that models trained on them stay valid.
    """
    vae.to(memory_format=torch.channels_last)
    vae.encoder.requires_grad_(not decoder_only)
    learned = [one for one in vae.parameters() if one.requires_grad]
    optimizer = adam((learned, rate))
    seen = total = 0.0
    for done in clock(minutes):
        set_rate(optimizer, done)
        scenes = [scene(r, plain=0.3, wide=r.random() < 0.5, world=world) for _ in range(16)]
        pixels = draw(scenes, SIDE)
        dark = 1 / torch.stack([light_of(one.light, SIDE) for one in scenes]).clamp(min=0.3)
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(pixels).latents
            noisy = latents + torch.randn_like(latents) * 0.08
            made = vae.decode(noisy).sample
        wrong = (made.float() - pixels) * dark
        loss = wrong.abs().mean() + 2 * slopes(wrong).abs().mean()
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
        pixels = draw([scene(r, plain=0.3, world=world) for _ in range(64)], SIDE)
        latents = vae.encode(pixels).latents
        made = vae.decode(latents).sample.clamp(-1, 1)
        psnr = 10 * torch.log10(4 / ((made - pixels) ** 2).mean((1, 2, 3))).mean()
    print(f"vae psnr {psnr:.2f} dB, latents {latents.mean():.3f} ± {latents.std():.3f}", flush=True)
    if decoder_only:
        return
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )


def batch_of(vae: Any, samples: list[Sample]) -> Batch:
    pictures: list[Scene] = [one.target for one in samples]
    places: list[tuple[int, int]] = []
    for row, one in enumerate(samples):
        for number, source in enumerate(one.sources):
            places.append((row, number))
            pictures.append(source)
    latents = encode(vae, draw(pictures, SIDE))
    target = latents[: len(samples)]
    sources = torch.zeros(len(samples), SOURCES, *target.shape[1:])
    for (row, number), latent in zip(places, latents[len(samples) :], strict=True):
        sources[row, number] = latent
    instructed = torch.tensor([bool(one.sources) for one in samples])
    apart = (target - sources[:, 0]).abs().amax(1, keepdim=True)
    return Batch(
        target,
        sources.flatten(1, 2),
        [one.text for one in samples],
        importance(apart * instructed[:, None, None, None]),
        instructed,
        [scene_classes(one.target) for one in samples],
        (apart > CHANGED).float(),
    )


def main() -> None:
    parser = arguments(__doc__, "text", "vae", "decoder", "meant", "unet")
    parser.add_argument(
        "--drawing", type=float, default=0.55, help="fraction of samples without a source image"
    )
    parser.add_argument(
        "--blending", type=float, default=0.5, help="fraction of the others with two"
    )
    parser.add_argument("--world", choices=WORLDS, default="wide", help="things that it learns")
    parser.add_argument("--start", type=Path, help="directory with weights to start the text from")
    options = parser.parse_args()
    r = seeded(options.seed)
    out: Path = options.out
    world = WORLDS[options.world]
    if options.stage == "text":
        samples = partial(choose_sample, world=world)
        known: list[str] = []
        if options.start is not None:
            words = read(options.start, "tokenizer").get_vocab()
            known = sorted(words, key=words.__getitem__)
        tokenizer = make_tokenizer(lambda r: samples(r).text, known)
        encoder = make_text_encoder(len(tokenizer))
        if options.start is not None:
            copied = copy_weights(encoder, read(options.start, "text_encoder"))
            print(f"copied weights: {copied:.2f}")
        text_stage(tokenizer, encoder, fields(world), samples, options, r)
        return
    if options.stage in ("vae", "decoder"):
        vae = read(out, "vae") if (out / "vae").exists() else make_vae()
        only = options.stage == "decoder"
        train_vae(vae, options.minutes, r, rate=2 * options.rate, decoder_only=only, world=world)
        vae.to(torch.bfloat16).save_pretrained(out / "vae")
        return
    if (out / "unet").exists():
        unet = read(out, "unet")
    else:
        unet = make_unet(outputs=1, sources=SOURCES, width=64)
    vae = read(out, "vae")
    blind = options.stage == "meant"
    if blind:
        choose = partial(choose_ambiguous, r, blending=options.blending, world=world)
    else:
        choose = partial(
            choose_sample, r, drawing=options.drawing, blending=options.blending, world=world
        )
    unet_stage(
        PocketImagePipeline,
        vae,
        unet,
        lambda: batch_of(vae, [choose() for _ in range(32)]),
        partial(show, world=world),
        options,
        r,
        heads=AuxiliaryHeads(unet, classes_of(world)),
        blind=blind,
    )


def show(pipe: PocketImagePipeline, path: Path, *, world: World = SHIPPED) -> None:
    """Save a page of samples: source, result and target."""
    r = random.Random(12345)
    rows = []
    for index in range(24):
        one = choose_sample(r, drawing=0.5, world=world)
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


if __name__ == "__main__":
    main()
