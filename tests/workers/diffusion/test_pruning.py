"""A pruned UNet is unchanged if no channel is removed, and nearly unchanged otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.common.denoising import LATENTS, SIDE, make_unet
from training.common.loop import TEXT
from training.video.pruning import prune
from workers.engines.diffusion.pocket_image import COORDINATES


@pytest.fixture(scope="module")
def wide() -> Any:
    torch.manual_seed(0)
    return make_unet(outputs=1, sources=0, width=96).eval()


@torch.no_grad()
def _draw(unet: Any) -> torch.Tensor:
    r = torch.Generator().manual_seed(1)
    seen = torch.randn(2, LATENTS + COORDINATES, SIDE // 4, SIDE // 4, generator=r)
    words, summary = torch.randn(2, 5, TEXT, generator=r), torch.randn(2, TEXT, generator=r)
    at = torch.tensor([900.0, 100.0])
    drawn = unet(seen, at, encoder_hidden_states=words, class_labels=summary).sample
    assert isinstance(drawn, torch.Tensor)
    return drawn


def test_pruning_no_channels_changes_nothing(wide: Any) -> None:
    assert torch.equal(_draw(prune(wide, 128).eval()), _draw(wide))


def test_with_fewer_it_is_smaller_and_draws_nearly_the_same(wide: Any) -> None:
    made = prune(wide, 80).eval()

    drawn, before = _draw(made), _draw(wide)
    assert made.num_parameters() < 0.75 * wide.num_parameters()
    likeness = torch.corrcoef(torch.stack([drawn.flatten(), before.flatten()]))[0, 1]
    assert likeness > 0.8
