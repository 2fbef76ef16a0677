"""Creates the decoder of a checkpoint: its cache and, if configured, its draft model."""

from __future__ import annotations

import logging

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.llm.cache import CacheShape, SequenceInput
from workers.engines.llm.checkpoint import Checkpoint, Weights, inspect
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.graphs import record_cuda
from workers.engines.llm.options import Options
from workers.engines.llm.speculation import DraftModel
from workers.engines.llm.varlen import VarlenCache, make_cache
from workers.engines.llm.vocabulary import Vocabulary
from workers.protocol.engine import Inspected

log = logging.getLogger(__name__)


def make_decoder(checkpoint: Weights, options: Options) -> Decoder:
    """Create the cache and run the model once. Raise ``ValueError`` if memory is too small."""
    shape, device = checkpoint.shape, checkpoint.device
    free = _free_bytes(device)
    if free is not None and shape.bytes > free:
        raise ValueError(
            f"the cache for {shape.blocks * shape.block_tokens} tokens takes "
            f"{shape.bytes / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free; lower the "
            "options cache_tokens or slots, or limits.context_tokens"
        )
    longest = checkpoint.context + options.decode_tokens_max
    cache = make_cache(shape, device, longest)
    decoder = Decoder(
        checkpoint.model,
        cache,
        device,
        rows=options.slots,
        decode_tokens_max=options.decode_tokens_max,
        one_forward=None if options.batch_invariant else True,
        # The shapes of a GatherCache grow with the past, so its forwards cannot be recorded.
        recorder=record_cuda if isinstance(cache, VarlenCache) else None,
    )
    with torch.inference_mode():
        token = SequenceInput([0], 0, [shape.sink])
        decoder.run(decoder.stage([token], [token]))
    log.info(
        "cache is ready",
        extra={
            "tokens": shape.blocks * shape.block_tokens,
            "bytes": shape.bytes,
            "one_forward": decoder.one_forward,
        },
    )
    return decoder


def load_draft(spec: ModelSpec, options: Options, checkpoint: Checkpoint) -> DraftModel | None:
    """Load the draft model, with the precision and the block numbers of the main model.

    Raise ``ValueError`` if the two do not match.
    """
    own = _draft_spec(spec, options)
    if own is None:
        return None
    try:
        draft = Checkpoint(own, options)
    except ValueError as error:
        raise ValueError(f"the draft model: {error}") from error
    _check_same(draft.vocabulary, checkpoint.vocabulary)
    shape: CacheShape = draft.shape
    draft.shape = CacheShape(
        shape.layers,
        checkpoint.shape.blocks,
        checkpoint.shape.block_tokens,
        shape.kv_heads,
        shape.head_dim,
        shape.dtype,
    )
    return DraftModel(make_decoder(draft, options))


def _draft_spec(spec: ModelSpec, options: Options) -> ModelSpec | None:
    speculation = options.speculation
    if speculation is None or speculation.checkpoint is None:
        return None
    return msgspec.structs.replace(spec, checkpoint=speculation.checkpoint)


def _check_same(draft: Vocabulary, main: Vocabulary) -> None:
    if draft.size != main.size:
        raise ValueError(
            f"the draft model has {draft.size} tokens and the main model {main.size}; both must "
            "have the same vocabulary"
        )


def inspect_models(spec: ModelSpec, options: Options) -> Inspected:
    """Check the checkpoints of an entry without reading weights. Raise ``ValueError`` as a load."""
    vocabulary, shape = inspect(spec, options)
    own = _draft_spec(spec, options)
    if own is not None:
        try:
            draft, _ = inspect(own, options)
        except ValueError as error:
            raise ValueError(f"the draft model: {error}") from error
        _check_same(draft, vocabulary)
    notes: tuple[str, ...] = ()
    if spec.task == "text-generation" and not vocabulary.has_template:
        notes = ("its tokenizer has no chat template: it serves completions, and refuses chats",)
    return Inspected(notes, cache_bytes=shape.bytes)


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; for a CPU, what Linux can provide without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
