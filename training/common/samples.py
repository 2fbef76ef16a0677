"""Chooses samples to train ``pocket-image``, none of which is held out."""

from __future__ import annotations

import random
from functools import partial
from typing import Final

from training.common import captions
from training.common.captions import EDITS, Sample
from training.common.scenes import SHIPPED, WIDE, World
from training.common.split import choose
from training.common.wide_captions import add_beside, describe_more

WORLDS: Final = {"shipped": SHIPPED, "wide": WIDE}


def choose_ambiguous(r: random.Random, *, blending: float = 0.3, world: World = SHIPPED) -> Sample:
    """Choose an instruction with two candidates: two things in a scene, or two scenes."""
    if r.random() < blending:
        return choose(partial(captions.blend, r, world=world))
    while True:
        kinds = [edit for edit in EDITS if edit not in (captions.add, captions.reground)]
        found = choose(partial(r.choice(kinds), r, world=world))
        if len(found.sources[0].things) == 2:
            return found


def choose_sample(
    r: random.Random, *, drawing: float = 0.55, blending: float = 0.3, world: World = SHIPPED
) -> Sample:
    """Choose a sample. ``drawing`` is the fraction of samples without a source, ``blending`` the
    fraction of the others that have two."""
    if r.random() < drawing:
        describe = captions.describe if world is SHIPPED else describe_more
        return choose(partial(describe, r, world=world))
    if r.random() < blending:
        return choose(partial(captions.blend, r, world=world))
    kind = r.random()
    if kind < 0.76:
        edits = EDITS if world is SHIPPED else (*EDITS, add_beside, add_beside)
        return choose(partial(r.choice(edits), r, world=world))
    return choose(partial(captions.relight if kind < 0.88 else captions.restyle, r, world=world))
