"""Creates the decoder of a checkpoint: its cache and, if configured, its draft model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.llm.cache import CacheShape, PagedCache, SequenceInput
from workers.engines.llm.checkpoint import Checkpoint, Weights, inspect
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.experts import has_experts, pad_experts
from workers.engines.llm.fused import make_model
from workers.engines.llm.graphs import record_cuda
from workers.engines.llm.options import Options
from workers.engines.llm.scheduling.scheduler import STEP_TOKENS
from workers.engines.llm.speculation import DraftModel
from workers.engines.llm.varlen import VarlenCache, make_cache
from workers.engines.llm.vocabulary import Vocabulary
from workers.engines.memory import budget_bytes, demand_of, memory_of, total_bytes
from workers.protocol.engine import Demand, Inspected

log = logging.getLogger(__name__)

_RECORDED: Final = 32
"""Part of a GPU's room, as a divisor, that is left for recorded forwards."""


def make_decoder(checkpoint: Weights, options: Options) -> Decoder:
    """Create the cache and run the model once. Raise ``ValueError`` if memory is too small."""
    _check_room([checkpoint])
    started = _start(checkpoint, options)
    _warm_up(started)
    return started.decoder


class Room(NamedTuple):
    """Memory that an entry can take: weights, caches, and what its forwards need."""

    limit_bytes: int | None = None
    """None: only what the device has."""
    used_before: int = 0
    """Memory of a GPU that was in use before the weights were read."""


class Decoders(NamedTuple):
    decoder: Decoder
    draft: DraftModel | None
    weights_bytes: int
    optional_bytes: int
    """What the caches take beyond those of one full context."""


def make_decoders(
    spec: ModelSpec, options: Options, checkpoint: Checkpoint, room: Room
) -> Decoders:
    """Create the decoder of a model and, if configured, that of its draft model.

    Both caches have the same blocks: by default as many as ``slots`` sequences of full context can
    use, or as fit into ``room`` after the largest step has been run. ``checkpoint.shape`` tells how
    many that is. Raise ``ValueError`` if one sequence does not fit, or if the models do not match.
    """
    models: list[Weights] = [checkpoint]
    if (draft := _read_draft(spec, options, checkpoint)) is not None:
        models.append(draft)
    wanted = checkpoint.shape.blocks
    least = _least(checkpoint.context, checkpoint.shape, options).blocks
    block_bytes = sum(model.shape.block_bytes for model in models)
    _set_blocks(models, least)
    _check_room(models)
    started = [_start(model, options) for model in models]
    if least < wanted:
        activations = _activation_bytes(checkpoint, started[0], options)
        spare = min(
            _spare_bytes(checkpoint.device, activations), _spare_room(models, room, activations)
        )
        _set_blocks(models, min(wanted, least + spare // block_bytes))
        for each in started:
            each.cache.resize(checkpoint.shape.blocks)
    if checkpoint.shape.blocks < wanted:
        log.warning(
            "the cache is smaller than all slots of full context could use",
            extra={
                "tokens": checkpoint.shape.blocks * checkpoint.shape.block_tokens,
                "wanted_tokens": wanted * checkpoint.shape.block_tokens,
            },
        )
    for each in started:
        _warm_up(each)
    _try_tower(checkpoint, 1)
    decoders = [each.decoder for each in started]
    return Decoders(
        decoders[0],
        DraftModel(decoders[1]) if draft is not None else None,
        sum(model.weights_bytes for model in models),
        (checkpoint.shape.blocks - least) * block_bytes,
    )


class _Started(NamedTuple):
    decoder: Decoder
    cache: PagedCache[Any]


def _start(checkpoint: Weights, options: Options) -> _Started:
    shape, device = checkpoint.shape, checkpoint.device
    longest = checkpoint.context + options.decode_tokens_max
    cache = make_cache(
        shape,
        device,
        longest,
        heads=checkpoint.heads,
        batch_invariant=options.batch_invariant,
    )
    decoder = Decoder(
        make_model(checkpoint.model, cache, longest),
        cache,
        device,
        rows=options.slots,
        decode_tokens_max=options.decode_tokens_max,
        one_forward=None if options.batch_invariant else True,
        recorder=record_cuda if _can_record(checkpoint, cache) else None,
        pad_experts=partial(pad_experts, checkpoint.model),
    )
    if options.batch_invariant and has_experts(checkpoint.model) and not decoder.one_forward:
        log.warning("the last bits of an answer depend on where other tokens are routed")
    return _Started(decoder, cache)


def _can_record(checkpoint: Weights, cache: PagedCache[Any]) -> bool:
    """Whether forwards of one shape are the same operations: not those of a ``GatherCache``, whose
    shapes grow with the past, and not those of experts, whose shapes depend on the routing."""
    return isinstance(cache, VarlenCache) and not has_experts(checkpoint.model)


def _warm_up(started: _Started) -> None:
    decoder, shape = started.decoder, started.cache.shape
    with torch.inference_mode():
        token = SequenceInput([0], 0, [shape.sink])
        for rows in decoder.row_counts if decoder.records else (1,):
            decoder.run(decoder.stage([token] * rows, [token]))
    log.info(
        "cache is ready",
        extra={
            "tokens": shape.blocks * shape.block_tokens,
            "bytes": shape.bytes,
            "one_forward": decoder.one_forward,
        },
    )


# --- Size of the cache ----------------------------------------------------------------------------


def _least(context: int, shape: CacheShape, options: Options) -> CacheShape:
    """Return the cache of one sequence of full context and at least one block for each slot, unless
    another number is configured."""
    if options.cache_tokens is not None:
        return shape
    longest = context + options.decode_tokens_max
    least = max(-(-longest // shape.block_tokens), options.slots)
    return replace(shape, blocks=min(shape.blocks, least))


def _set_blocks(models: Sequence[Weights], blocks: int) -> None:
    for model in models:
        model.shape = replace(model.shape, blocks=blocks)


def _check_room(models: Sequence[Weights]) -> None:
    needed, free = sum(model.shape.bytes for model in models), _free_bytes(models[0].device)
    if free is not None and needed > free:
        tokens = models[0].shape.blocks * models[0].shape.block_tokens
        raise ValueError(
            f"the cache for {tokens} tokens takes {needed / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} GiB are free; lower the options cache_tokens or slots, or "
            "limits.context_tokens"
        )


def _activation_bytes(checkpoint: Checkpoint, started: _Started, options: Options) -> int:
    """Run the largest step and the largest picture. Return the memory that they take beside weights
    and cache, on CUDA."""
    device, shape = started.cache.device, started.cache.shape
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _run_largest(started.decoder, shape, options)
    if checkpoint.pictures is not None:
        _try_tower(checkpoint, checkpoint.pictures.tokens_max)
    used = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return used


def _run_largest(decoder: Decoder, shape: CacheShape, options: Options) -> None:
    """Prefill as many tokens as a step can have, with as many logits."""
    ids = [0] * min(shape.block_tokens, STEP_TOKENS)
    chunks = STEP_TOKENS // len(ids)
    logits = -(-options.slots * options.decode_tokens_max // chunks)
    chunk = SequenceInput(ids, 0, [shape.sink], min(len(ids), logits))
    with torch.inference_mode():
        decoder.run(decoder.stage([], [chunk] * chunks))


def _try_tower(checkpoint: Checkpoint, tokens: int) -> None:
    """Encode an empty picture of this size, if the model reads any."""
    if checkpoint.tower is not None:
        with torch.inference_mode():
            checkpoint.tower.warm_up(tokens)


def _spare_bytes(device: torch.device, activations: int) -> int:
    """Return the memory that can still be used, without activations and a reserve; on a CPU, whose
    memory other programs use too, half of it."""
    free, total, budget = _free_bytes(device), total_bytes(device), budget_bytes(device)
    if total is None or budget is None:
        return 0
    if free is None:
        free = total // 2
    spare = max(0, free - activations - (total - budget))
    return spare // 2 if device.type == "cpu" else spare


def _spare_room(models: Sequence[Weights], room: Room, activations: int) -> int:
    """Return how much of the entry's room is left beside its weights and smallest caches."""
    if room.limit_bytes is None:
        return sys.maxsize
    taken = sum(model.weights_bytes + model.shape.bytes for model in models)
    used = memory_of(models[0].device, 0).device_used_bytes
    reserve = room.limit_bytes // _RECORDED if used else 0
    return max(0, room.limit_bytes - max(taken, used - room.used_before) - activations - reserve)


# --- Draft models ---------------------------------------------------------------------------------


def _read_draft(spec: ModelSpec, options: Options, checkpoint: Checkpoint) -> Weights | None:
    """Read the draft model. Raise ``ValueError`` if it does not match the main model."""
    own = _draft_spec(spec, options)
    if own is None:
        return None
    try:
        draft = Checkpoint(own, options)
    except ValueError as error:
        raise ValueError(f"the draft model: {error}") from error
    _check_same(draft.vocabulary, checkpoint.vocabulary)
    return draft


def _draft_spec(spec: ModelSpec, options: Options) -> ModelSpec | None:
    speculation = options.speculation
    if speculation is None or speculation.checkpoint is None:
        return None
    # It reads no pictures: what it guesses about them, the model corrects.
    limits = {name: value for name, value in spec.limits.items() if name != "source_tokens"}
    return msgspec.structs.replace(spec, checkpoint=speculation.checkpoint, limits=limits)


def _check_same(draft: Vocabulary, main: Vocabulary) -> None:
    if draft.size != main.size:
        raise ValueError(
            f"the draft model has {draft.size} tokens and the main model {main.size}; both must "
            "have the same vocabulary"
        )


def inspect_models(spec: ModelSpec, options: Options) -> Inspected:
    """Check the checkpoints of an entry without reading weights. Raise ``ValueError`` as a load."""
    vocabulary, context, shape = inspect(spec, options)
    own = _draft_spec(spec, options)
    if own is not None:
        try:
            draft, _, _ = inspect(own, options)
        except ValueError as error:
            raise ValueError(f"the draft model: {error}") from error
        _check_same(draft, vocabulary)
    notes: tuple[str, ...] = ()
    if spec.task == "text-generation" and not vocabulary.has_template:
        notes = ("its tokenizer has no chat template: it serves completions, and refuses chats",)
    device = options.torch_device
    cache_bytes = _least(context, shape, options).bytes
    return Inspected(notes, options.hardware.device, total_bytes(device), cache_bytes)


def estimate_memory(spec: ModelSpec, options: Options) -> Demand:
    """Estimate the least memory of an entry: weights, draft model and caches."""
    cache_bytes = inspect_models(spec, options).cache_bytes
    needed = demand_of(spec, options, cache_bytes)
    if (draft := _draft_spec(spec, options)) is not None:
        _, context, shape = inspect(draft, options)
        own = demand_of(draft, options, _least(context, shape, options).bytes)
        needed = needed._replace(bytes=needed.bytes + own.bytes)
    return needed


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; for a CPU, what Linux can provide without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
