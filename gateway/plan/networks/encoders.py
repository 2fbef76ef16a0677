"""Encoders of prompts: CLIP's and T5's, of transformers."""

from __future__ import annotations

from gateway.plan.networks.tally import Config, Tally, Work


def clip_work(config: Config, *, text: int, projected: bool) -> Work:
    tally, width = Tally(), config["hidden_size"]
    text = min(text, config["max_position_embeddings"])
    tally.weights((config["vocab_size"] + config["max_position_embeddings"]) * width)
    for _ in range(config["num_hidden_layers"]):
        tally.weights(4 * width)
        tally.linear(width, 3 * width, text)
        tally.linear(width, width, text)
        tally.attend(text, text, width)
        tally.mlp(width, config["intermediate_size"], text)
    tally.weights(2 * width)
    if projected:
        tally.linear(width, config["projection_dim"], 1, bias=False)
    return tally.work


def t5_work(config: Config, *, text: int) -> Work:
    """Also UMT5, each layer of which has its own table of relative positions."""
    tally, width = Tally(), config["d_model"]
    inner = config["num_heads"] * config["d_kv"]
    layers = config["num_layers"]
    gated = "gated" in config.get("feed_forward_proj", "relu")
    tables = layers if config.get("model_type") == "umt5" else 1
    tally.weights(config["vocab_size"] * width)
    tally.weights(tables * config["relative_attention_num_buckets"] * config["num_heads"])
    for _ in range(layers):
        tally.weights(2 * width)
        tally.linear(width, 3 * inner, text, bias=False)
        tally.linear(inner, width, text, bias=False)
        tally.attend(text, text, inner)
        tally.linear(width, (2 if gated else 1) * config["d_ff"], text, bias=False)
        tally.linear(config["d_ff"], width, text, bias=False)
    tally.weights(width)
    return tally.work
