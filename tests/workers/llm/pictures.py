"""Tiny random checkpoints that read pictures, pictures for them, and the library's answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.workers.llm.checkpoints import make_tokenizer
from workers.contract.jobs import ChatInput, ChatMessage, Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.llm.engine import LlmEngine

FAMILIES = ("qwen2vl", "qwen2.5vl")
PICTURE_TOKENS = 40
"""``limits.source_tokens``: 38 of a picture, and two around it."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Part = str | bytes
"""A text or a picture."""

_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 2, 2],
    },
}
_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a picture of noise, as a PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_pictured(family: str, path: Path, *, template: str = TEMPLATE, **text: Any) -> Path:
    """Write a random model that reads pictures, its tokenizer and its image processor."""
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    marks = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": len(tokenizer),
    }
    shape = {**_TEXT, "vocab_size": len(tokenizer) + 1, **text}
    torch.manual_seed(11)
    if family == "qwen2vl":
        vision = {**_VISION, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
        model: Any = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=shape, vision_config=vision, **marks)
        )
    else:
        vision = {**_VISION, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=shape, vision_config=vision, **marks)
        )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=256, max_pixels=1 << 20
    ).save_pretrained(path)
    return path


def pictured_spec(
    path: Path, source_tokens: int | None = PICTURE_TOKENS, **given: Any
) -> ModelSpec:
    limits = {} if source_tokens is None else {"source_tokens": source_tokens}
    return ModelSpec(
        name="looker",
        task="text-generation",
        engine="llm",
        checkpoint=str(path),
        options={"slots": 4, "device": "cpu", **given},
        limits=limits,
    )


def pictured_engine(
    path: Path, source_tokens: int | None = PICTURE_TOKENS, **given: Any
) -> LlmEngine:
    engine = LlmEngine(pictured_spec(path, source_tokens, **given))
    engine.load()
    return engine


def look(name: str, *parts: Part, account: str = "1", **chat: Any) -> tuple[Job, list[bytes]]:
    """Return a job of one message, and its attachments."""
    files = [part for part in parts if isinstance(part, bytes)]
    numbers = iter(range(len(files)))
    mixed = tuple(part if isinstance(part, str) else next(numbers) for part in parts)
    said = "".join(part for part in parts if isinstance(part, str))
    message = ChatMessage("user", said, parts=mixed if files else ())
    given = {"max_tokens": 12, "temperature": 0.0, **chat}
    job = Job(
        request_id=RequestId(name),
        account_id=account,
        model="looker",
        task="text-generation",
        input=msgspec.to_builtins(ChatInput(messages=(message,), **given)),
        stream=True,
    )
    return job, files


class PicturedReference:
    """The library's own greedy generation, with its own processor and positions."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path)
        processor.size = {"shortest_edge": 256, "longest_edge": (PICTURE_TOKENS - 2) * 64}
        self._processor = processor

    def generate(self, parts: Sequence[Part], tokens: int) -> tuple[int, int, str]:
        """Return the numbers of input and output tokens, and the text."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        images = [Image.open(io.BytesIO(part)) for part in parts if isinstance(part, bytes)]
        more: dict[str, Any] = {}
        if images:
            more = dict(self._processor(images=images, return_tensors="pt"))
            before, *after = text.split("<|image_pad|>")
            for grid, rest in zip(more["image_grid_thw"], after, strict=True):
                before += "<|image_pad|>" * (int(grid.prod()) // 4) + rest
            text = before
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if images:
            more["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            **more,
        )[0, ids.shape[1] :]
        return ids.shape[1], len(out), self.tokenizer.decode(out, skip_special_tokens=True)
