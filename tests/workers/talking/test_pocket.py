"""The shipped talking-head model: small, as on its card, and right in what it detects."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.workers.driving import Run
from tests.workers.talking.driver import (
    CHECKPOINT,
    engine_of,
    frames_of,
    job,
    person,
    png,
    speech,
    wav,
)
from training.common import scenes
from training.talking import faces
from training.talking.score import drawn, faceless, score_ear, spoken
from workers.contract.jobs import Completed
from workers.engines.talking.mouth_shapes import loudness, predict_mouths
from workers.engines.talking.networks import Networks, read_networks
from workers.engines.talking.portrait import Portrait, PortraitError


@pytest.fixture(scope="module")
def networks() -> Networks:
    torch.set_num_threads(1)
    return read_networks(CHECKPOINT)


def test_the_weights_are_few_and_those_on_the_card() -> None:
    file = CHECKPOINT / "model.safetensors"

    assert file.stat().st_size <= 2**20
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256 in (CHECKPOINT / "README.md").read_text()


def test_mouth_opens_for_unseen_voices_and_closes_for_silence(
    networks: Networks,
) -> None:
    found = score_ear(networks.mouth_predictor, count=6)

    opening, width, teeth, _ = found.correlation
    assert opening > 0.85
    assert width > 0.7
    assert teeth > 0.7
    assert found.silent < 0.08


def test_mouth_shapes_do_not_depend_on_the_level(networks: Networks) -> None:
    said = speech(2.0, 5).samples
    said = said / np.abs(said).max()

    loud, quiet = (
        predict_mouths(networks.mouth_predictor, loudness(said * gain), fps=Fraction(25), frames=50)
        for gain in (0.9, 0.09)
    )

    assert np.abs(loud - quiet).max() < 0.05


def test_mouths_are_found_in_unseen_faces(networks: Networks) -> None:
    off, missed = [], 0
    for seed in range(20, 36):
        pixels, points = person(seed, side=192)
        try:
            found = Portrait(
                pixels, networks.landmark_detector, networks.mouth_renderer
            ).points.numpy()
        except PortraitError:
            missed += 1
            continue
        off.append(np.linalg.norm(found[:2] - points[:2], axis=1).mean())

    assert missed <= 1
    assert np.median(off) < 3.5, "pixels of 192, where a mouth is some 40 wide"


def test_no_mouth_is_found_without_a_face(networks: Networks) -> None:
    for seed in range(8):
        picture = scenes.draw([faceless(seed)], 128)[0]
        pixels = ((picture + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        with pytest.raises(PortraitError):
            Portrait(pixels, networks.landmark_detector, networks.mouth_renderer)


def test_a_mouth_is_found_in_a_tall_picture_and_in_a_large_one(networks: Networks) -> None:
    pixels, points = person(7, side=160)
    tall = np.pad(pixels, ((0, 120), (20, 20), (0, 0)), mode="edge")
    large = np.kron(pixels, np.ones((4, 4, 1), np.uint8))

    in_tall = Portrait(tall, networks.landmark_detector, networks.mouth_renderer).points.numpy()
    in_large = Portrait(large, networks.landmark_detector, networks.mouth_renderer).points.numpy()

    assert np.abs(in_tall[:2] - (points[:2] + np.array((20, 0)))).max() < 5
    assert np.abs(in_large[:2] - points[:2] * 4).max() < 20


def test_only_mouth_and_chin_move_and_more_the_wider_it_opens(networks: Networks) -> None:
    people = faces.choose(torch.Generator().manual_seed(77), 1, near=(0.7, 0.8))
    shut = torch.zeros(1, 4)
    portrait = Portrait(drawn(people, shut), networks.landmark_detector, networks.mouth_renderer)
    shapes = torch.zeros(4, 4)
    shapes[:, 0] = torch.tensor([0.0, 0.3, 0.6, 1.0])

    frames = spoken(networks, portrait, shapes)

    change = [np.abs(frame.astype(int) - portrait.pixels) for frame in frames]
    left, right, chin = portrait.points[:3].numpy()
    reach = 2.2 * max(np.linalg.norm(right - left), np.linalg.norm(chin - (left + right) / 2))
    y, x = np.mgrid[: portrait.pixels.shape[0], : portrait.pixels.shape[1]]
    middle = (left + right) / 2
    away = np.maximum(np.abs(x - middle[0]), np.abs(y - middle[1])) > reach
    assert away.any()
    assert all(one[away].max() == 0 for one in change)
    assert change[0].mean() < 0.6
    assert change[1].mean() < change[2].mean() < change[3].mean()


def test_mouth_of_a_video_follows_the_audio() -> None:
    found = []
    for seed in (41, 42):
        said = speech(3.0, seed)
        pixels, points = person(seed, side=192)
        run = Run(engine_of(), (job("a"), [png(pixels), wav(said.samples)]))
        outcome = run.finish()["a"]
        assert isinstance(outcome, Completed), outcome
        frames = frames_of(outcome.files[0].data).astype(int)
        left, right = points[:2]
        half = int((right - left)[0] * 0.7)
        x, y = ((left + right) / 2).astype(int)
        box = (slice(None), slice(max(0, y - half // 2), y + half), slice(x - half, x + half))
        change = np.abs(frames[box] - pixels[box[1:]]).mean(axis=(1, 2, 3))
        times = (np.arange(len(frames)) + 0.5) * 4
        opening = np.interp(times, np.arange(len(said.mouths)), said.mouths[:, 0])
        found.append(float(np.corrcoef(change, opening)[0, 1]))

    assert min(found) > 0.75
    assert np.mean(found) > 0.8
