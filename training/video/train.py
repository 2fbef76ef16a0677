r"""Trains ``pocket-video`` on moving scenes, with the autoencoder of ``pocket-image``.

    for stage in text:4 meant:15 unet:90 prune:0 unet:85; do
        python -m training.video.train --stage ${stage%:*} --minutes ${stage#*:} \
            --image workers/pocket/image --out DIR
    done

Text encoder and UNet start from the weights of the image model. The text encoder learns to classify
motion. The UNet has the frames of a clip stacked as channels: it first learns at full noise which
thing moves where, from first frames, and then rectified flow, half of the time with the first frame
given. Then it is pruned and trained again. The result is a directory in diffusers' format, in
bfloat16.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image

from training.common.auxiliary_heads import CLASSES, AuxiliaryHeads, scene_classes
from training.common.denoising import (
    CHANGED,
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
from training.common.loop import copy_weights, make_text_encoder, make_tokenizer
from training.common.scenes import sheet
from training.common.split import choose
from training.video.clips import FIELDS, FRAMES, MOTIONS, Clip, clip, film
from training.video.pruning import prune
from workers.engines.diffusion.pocket_video import PocketVideoPipeline

CLIPS: Final = 24
FRESH: Final = 8
"""Number of new clips in a batch; the others are repeated with other noise."""
KEPT: Final = 2000
INNERMOST: Final = 80
"""Channels of the innermost blocks after pruning, of 128."""


class Clips:
    """Batches of clips with their latents. Most clips are repeated, because rendering one costs
    more than a training step on it."""

    def __init__(self, vae: Any, r: random.Random, *, pictured: bool | None = None) -> None:
        self._vae = vae.to(memory_format=torch.channels_last)
        self._r, self._pictured = r, pictured
        self._kept: deque[tuple[Clip, torch.Tensor]] = deque(maxlen=KEPT)

    def next(self) -> Batch:
        count = FRESH if len(self._kept) > CLIPS else CLIPS
        make = partial(clip, self._r, pictured=self._pictured)
        fresh = [choose(make) for _ in range(count)]
        frames = film(fresh, SIDE)
        latents = encode(self._vae, frames.flatten(0, 1))
        latents = latents.view(*frames.shape[:2], *latents.shape[1:])
        chosen = list(zip(fresh, latents, strict=True))
        again = self._r.sample(self._kept, CLIPS - len(chosen))
        self._kept.extend(chosen)
        clips, targets = zip(*chosen, *again, strict=True)
        target = torch.stack(targets)
        pictured = torch.tensor([one.pictured for one in clips])
        apart = (target - target[:, :1]).abs().amax((1, 2))[:, None]
        return Batch(
            target.flatten(1, 2),
            target[:, 0] * pictured[:, None, None, None],
            [one.text for one in clips],
            importance(apart) * torch.tensor([_dimness(one) for one in clips])[:, None, None, None],
            pictured,
            [scene_classes(one.scene) | {"motion": one.motion} for one in clips],
            (apart > CHANGED).float(),
        )


def _dimness(one: Clip) -> float:
    """Return the weight of a clip: more in the dark, where differences in colour are small."""
    return 1.7 if "dark" in one.scene.background or one.scene.light == "night" else 1.0


def main() -> None:
    parser = arguments(__doc__, "text", "meant", "unet", "prune")
    parser.add_argument("--image", type=Path, required=True, help="the image model")
    options = parser.parse_args()
    r = seeded(options.seed)
    out: Path = options.out
    if options.stage == "text":
        words = read(options.image, "tokenizer").get_vocab()
        known = sorted(words, key=words.__getitem__)
        tokenizer = make_tokenizer(lambda r: choose(partial(clip, r)).text, known)
        encoder = make_text_encoder(len(tokenizer))
        print(f"copied weights: {copy_weights(encoder, read(options.image, 'text_encoder')):.2f}")
        text_stage(tokenizer, encoder, FIELDS, lambda r: choose(partial(clip, r)), options, r)
        return
    if options.stage == "prune":
        prune(read(out, "unet"), INNERMOST).save_pretrained(out / "unet")
        return
    if (out / "unet").exists():
        unet = read(out, "unet")
    else:
        unet = make_unet(outputs=FRAMES, sources=1, width=96)
        print(f"copied weights: {copy_weights(unet, read(options.image, 'unet')):.2f}", flush=True)
    vae = read(options.image, "vae")
    blind = options.stage == "meant"
    unet_stage(
        PocketVideoPipeline,
        vae,
        unet,
        Clips(vae, r, pictured=True if blind else None).next,
        show,
        options,
        r,
        heads=AuxiliaryHeads(unet, CLASSES | {"motion": MOTIONS}),
        blind=blind,
    )


def show(pipe: PocketVideoPipeline, path: Path) -> None:
    """Save a page of clips, every third frame: the target and, below it, the result."""
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


if __name__ == "__main__":
    main()
