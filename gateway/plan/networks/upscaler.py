"""The compact super-resolution network, whose layers run at the size of the source."""

from __future__ import annotations

from gateway.plan.networks.tally import Config, Tally, Work


def compact_work(config: Config, *, pixels: int) -> Work:
    """Return the work for a source of so many pixels."""
    tally, width = Tally(), config["width"]
    tally.conv(3, width, 9, pixels)
    for _ in range(config["depth"]):
        tally.conv(width, width, 9, pixels)
    tally.weights((config["depth"] + 1) * width)
    tally.conv(width, 3 * config["scale"] ** 2, 9, pixels)
    return tally.work
