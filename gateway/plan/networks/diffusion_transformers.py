"""Denoisers that are transformers: those of Flux, Stable Diffusion 3, Wan and LTX-Video.

``positions`` are the patches of the latents, ``text`` the tokens of the prompt.
"""

from __future__ import annotations

import math

from gateway.plan.networks.tally import Config, Tally, Work

_TIME: int = 256
"""Width of the sinusoidal embedding of the time."""


def flux_work(config: Config, *, positions: int, text: int) -> Work:
    tally, width, head = Tally(), _width(config), config["attention_head_dim"]
    every = positions + text
    tally.linear(config["in_channels"], width, positions)
    tally.linear(config["joint_attention_dim"], width, text)
    for _ in range(2 if config.get("guidance_embeds") else 1):
        tally.mlp(_TIME, width, 1, width)
    tally.mlp(config["pooled_projection_dim"], width, 1, width)
    for _ in range(config["num_layers"]):
        for stream in (positions, text):
            tally.linear(width, 6 * width, 1)
            tally.linear(width, 3 * width, stream)
            tally.linear(width, width, stream)
            tally.mlp(width, 4 * width, stream)
            tally.weights(2 * head)
        tally.attend(every, every, width)
    for _ in range(config["num_single_layers"]):
        tally.linear(width, 3 * width, 1)
        tally.linear(width, 7 * width, every)
        tally.linear(5 * width, width, every)
        tally.weights(2 * head)
        tally.attend(every, every, width)
    tally.linear(width, 2 * width, 1)
    outputs = config.get("out_channels") or config["in_channels"]
    tally.linear(width, config.get("patch_size", 1) ** 2 * outputs, positions)
    return tally.work


def sd3_work(config: Config, *, positions: int, text: int) -> Work:
    tally, width, head = Tally(), _width(config), config["attention_head_dim"]
    patch = config["patch_size"] ** 2
    norms = 2 * head if config.get("qk_norm") else 0
    tally.conv(config["in_channels"], width, patch, positions)
    tally.mlp(_TIME, width, 1, width)
    tally.mlp(config["pooled_projection_dim"], width, 1, width)
    tally.linear(config["joint_attention_dim"], config["caption_projection_dim"], text)
    for layer in range(config["num_layers"]):
        is_last = layer == config["num_layers"] - 1
        is_dual = layer in config.get("dual_attention_layers", ())
        tally.linear(width, (9 if is_dual else 6) * width, 1)
        tally.linear(width, (2 if is_last else 6) * width, 1)
        for stream in (positions, text):
            tally.linear(width, 3 * width, stream)
            tally.weights(norms)
        tally.attend(positions + text, positions + text, width)
        for stream in (positions,) if is_last else (positions, text):
            tally.linear(width, width, stream)
            tally.mlp(width, 4 * width, stream)
        if is_dual:
            tally.linear(width, 3 * width, positions)
            tally.linear(width, width, positions)
            tally.weights(norms)
            tally.attend(positions, positions, width)
    tally.linear(width, 2 * width, 1)
    tally.linear(width, patch * (config.get("out_channels") or config["in_channels"]), positions)
    return tally.work


def wan_work(config: Config, *, positions: int, text: int) -> Work:
    tally, width = Tally(), _width(config)
    patch = math.prod(config["patch_size"])
    tally.conv(config["in_channels"], width, patch, positions)
    tally.mlp(config["freq_dim"], width, 1, width)
    tally.linear(width, 6 * width, 1)
    tally.mlp(config["text_dim"], width, text, width)
    image = 0
    if seen := config.get("image_dim"):
        image = 257  # patches of the picture encoder, and its summary
        tally.weights(2 * seen + 2 * width)
        tally.mlp(seen, seen, image, width)
    added = config.get("added_kv_proj_dim") or 0
    for _ in range(config["num_layers"]):
        tally.weights(4 * width + (2 * width if config.get("cross_attn_norm") else 0) + 6 * width)
        tally.linear(width, 3 * width, positions)
        tally.linear(width, width, positions)
        tally.attend(positions, positions, width)
        tally.linear(width, width, positions)
        tally.linear(width, 2 * width, text)
        tally.linear(width, width, positions)
        tally.attend(positions, text, width)
        if added:
            tally.weights(width)
            tally.linear(added, 2 * width, image)
            tally.attend(positions, image, width)
        tally.mlp(width, config["ffn_dim"], positions)
    tally.weights(2 * width)
    tally.linear(width, patch * (config.get("out_channels") or config["in_channels"]), positions)
    return tally.work


def ltx_work(config: Config, *, positions: int, text: int) -> Work:
    tally, width = Tally(), _width(config)
    cross = config["cross_attention_dim"]
    tally.linear(config["in_channels"], width, positions)
    tally.mlp(_TIME, width, 1, width)
    tally.linear(width, 6 * width, 1)
    tally.mlp(config["caption_channels"], width, text, width)
    for _ in range(config["num_layers"]):
        tally.weights(4 * width + 6 * width)
        tally.linear(width, 3 * width, positions)
        tally.linear(width, width, positions)
        tally.attend(positions, positions, width)
        tally.linear(width, width, positions)
        tally.linear(cross, 2 * width, text)
        tally.linear(width, width, positions)
        tally.attend(positions, text, width)
        tally.mlp(width, 4 * width, positions)
    tally.weights(2 * width)
    tally.linear(width, config.get("out_channels") or config["in_channels"], positions)
    return tally.work


def _width(config: Config) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])
