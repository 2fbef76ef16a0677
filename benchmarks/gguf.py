"""Writes a checkpoint of Qwen3's shape as a GGUF file in float32, for llama.cpp.

Only for the comparison: Tollgate itself does not read GGUF. Needs the package ``gguf`` (extra
``peers``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_BLOCK: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_LEVEL: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def convert(checkpoint: Path, out: Path) -> Path:
    """Convert a checkpoint. Raise ``ImportError`` without the package, ``ValueError`` for other
    models."""
    import gguf
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["Qwen3ForCausalLM"]:
        raise ValueError(
            f"cannot convert {config['architectures']} to GGUF; only Qwen3ForCausalLM is supported"
        )
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10_000))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, checkpoint, config)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_BLOCK[rest.removesuffix('.weight')]}.weight"


def _add_vocabulary(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    import gguf
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    document = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"]: token["special"] for token in document["added_tokens"]}
    known = {id: token for token, id in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for id in range(config["vocab_size"]):
        tokens.append(known.get(id, f"<unused{id}>"))
        if id in special:
            kind = gguf.TokenType.CONTROL if special[id] else gguf.TokenType.USER_DEFINED
        else:
            kind = gguf.TokenType.NORMAL if id in known else gguf.TokenType.UNUSED
        types.append(kind)
    merges = document["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
