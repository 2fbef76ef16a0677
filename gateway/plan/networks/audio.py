"""Decoders that generate the codec tokens of speech and music, frame by frame: CSM and MusicGen.

Their keys and values, small beside the weights for a minute of audio, are ignored.
"""

from __future__ import annotations

from gateway.plan.networks.tally import Config, Tally, Work


def musicgen_work(config: Config) -> Work:
    """Return the work of one frame, which all codebooks of the decoder share."""
    decoder = config["decoder"]
    tally, width = Tally(), decoder["hidden_size"]
    codebooks, vocabulary = decoder["num_codebooks"], decoder["vocab_size"]
    tally.weights(codebooks * (vocabulary + 1) * width)
    encoded = config["text_encoder"]["d_model"]
    if encoded != width:
        tally.linear(encoded, width, 0)
    for _ in range(decoder["num_hidden_layers"]):
        tally.weights(6 * width)
        tally.linear(width, 4 * width, 1, bias=False)
        # Keys and values of the text are computed once.
        tally.linear(width, 2 * width, 1, bias=False)
        tally.linear(width, 2 * width, 0, bias=False)
        tally.linear(width, decoder["ffn_dim"], 1, bias=False)
        tally.linear(decoder["ffn_dim"], width, 1, bias=False)
    tally.weights(2 * width)
    tally.linear(width, codebooks * vocabulary, 1, bias=False)
    return tally.work


def csm_work(config: Config) -> tuple[Work, Work]:
    """Return the work of the backbone for one frame, and of the depth decoder for one codebook."""
    backbone = Tally()
    _layers(backbone, config)
    backbone.weights(config["text_vocab_size"] * config["hidden_size"])
    backbone.weights(config["num_codebooks"] * config["vocab_size"] * config["hidden_size"])
    backbone.linear(config["hidden_size"], config["vocab_size"], 1, bias=False)
    depth, part = Tally(), config["depth_decoder_config"]
    _layers(depth, part)
    depth.linear(part["backbone_hidden_size"], part["hidden_size"], 1, bias=False)
    # Each codebook has a head of its own.
    depth.linear(part["hidden_size"], part["vocab_size"], 1, bias=False)
    depth.weights((part["num_codebooks"] - 2) * part["vocab_size"] * part["hidden_size"])
    return backbone.work, depth.work


def _layers(tally: Tally, config: Config) -> None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    keys = config["num_key_value_heads"] * head
    for _ in range(config["num_hidden_layers"]):
        tally.weights(2 * width)
        tally.linear(width, heads * head + 2 * keys, 1, bias=False)
        tally.linear(heads * head, width, 1, bias=False)
        tally.linear(width, 3 * config["intermediate_size"], 1, bias=False)
    tally.weights(width)
