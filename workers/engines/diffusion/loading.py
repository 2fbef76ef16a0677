"""Loads a checkpoint in diffusers' format, and adds batch points to its components."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from workers.contract.models import ModelSpec
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import (
    adapters,
    autoencoder,
    controls,
    references,
    schedulers,
    text_lengths,
)
from workers.engines.diffusion.families import DENOISERS, ENCODERS, PipelineFamily, families_of
from workers.engines.diffusion.options import Options
from workers.engines.diffusion.parking import Parking, run_on
from workers.engines.footprint import weights_estimate
from workers.engines.memory import weights_bytes
from workers.engines.precision import QUANTIZED, quantize

PARKED: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")
"""Parts that can wait in host memory: large, and used once or twice in a request."""
log = logging.getLogger(__name__)


class Placement(NamedTuple):
    """Memory of the device that weights take, the part of it without which they work, and memory of
    the host."""

    resident_bytes: int = 0
    optional_bytes: int = 0
    host_bytes: int = 0


class Variant(NamedTuple):
    """What the networks are switched to for a request; requests of one variant share batches."""

    adapters: adapters.Selection = adapters.NO_ADAPTERS
    reference: float | None = None
    """Strength of its reference image, if it has one."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory: pipelines by class name; they share their components."""

    pipelines: Mapping[str, Any]
    families: Mapping[str, PipelineFamily]
    """Families by task."""
    denoiser: Any
    controlled: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """Pipelines with a control network, by the class name without it and the network's name."""
    parking: Parking | None = None
    """What brings the parts that wait in host memory; None if all are on the device."""

    def copy_for(self, family: PipelineFamily, scheduler: str | None, control: str = "") -> Any:
        """Return a shallow copy of a pipeline with a new scheduler, so that no state is shared."""
        name = family.pipeline
        pipeline = copy.copy(self.controlled[name, control] if control else self.pipelines[name])
        pipeline.scheduler = schedulers.choose(pipeline.scheduler, scheduler)
        if (guider := getattr(pipeline, "guider", None)) is not None:
            pipeline.guider = copy.deepcopy(guider)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def load(
    spec: ModelSpec,
    options: Options,
    batcher: CooperativeBatcher,
    room_bytes: int | None = None,
) -> LoadedCheckpoint:
    """Load the weights. Raise ``ValueError`` with a sentence for the operator.

    If they take more than ``room_bytes`` of the device, some wait in host memory between uses.
    """
    path = Path(spec.checkpoint or "")
    families, has_checker = inspect(spec, options)
    family = next(iter(families.values()))
    pipeline = _load_pipeline(path, family, options, has_checker=has_checker)
    denoiser = next(part for name in DENOISERS if (part := getattr(pipeline, name, None)))
    _add_loras(pipeline, options)
    refer = references.load(pipeline, denoiser, options)
    adapters.load(pipeline, options.adapters)
    for name in DENOISERS:
        if (part := getattr(pipeline, name, None)) is not None:
            quantize(part, options.dtype, options.torch_device)
    _keep_vae_in_float32(pipeline)
    networks = controls.load(type(pipeline).__name__, options, batcher)
    if room_bytes is not None:
        room_bytes -= weights_bytes(networks)
    parking = _place(pipeline, options.torch_device, room_bytes)
    schedulers.choose(pipeline.scheduler, options.scheduler)
    _add_batch_points(pipeline, batcher, options.tiling, refer, parking)
    inpainting = [
        family.inpainting for family in families.values() if family.inpainting is not None
    ]
    pipelines = {
        family.pipeline: pipeline
        if family.pipeline == type(pipeline).__name__
        else _share_components(pipeline, family.load_class())
        for family in (*families.values(), *inpainting)
    }
    controlled = {
        (name, control): _share_components(
            pipeline, getattr(diffusers, controls.PIPELINES[name].pipeline), controlnet=network
        )
        for name in pipelines
        if name in controls.PIPELINES
        for control, network in networks.items()
    }
    if parking is not None:
        for each in (*pipelines.values(), *controlled.values()):
            run_on(each, options.torch_device)
    return LoadedCheckpoint(pipelines, families, denoiser, controlled, parking)


def inspect(spec: ModelSpec, options: Options) -> tuple[Mapping[str, PipelineFamily], bool]:
    """Return the families by task, and whether the pipeline has a place for a safety checker.

    Reads no weights. Raise ``ValueError`` with a sentence for the operator.
    """
    path = Path(spec.checkpoint or "")
    class_name = pipeline_class_of(path)
    families = families_of(class_name, spec)
    index = json.loads((path / "model_index.json").read_text())
    if options.safety and "safety_checker" not in index:
        raise ValueError(f"safety is on, but {class_name} has no safety checker")
    if options.safety and index["safety_checker"][0] is None:
        raise ValueError("safety is on, but the checkpoint has no safety checker")
    for name in (*DENOISERS, *ENCODERS, "vae"):
        if (index.get(name) or [None])[0] is not None and not (path / name).is_dir():
            raise ValueError(f"{path} lacks the directory {name}, which model_index.json names")
    loras = [one.checkpoint for one in options.lora]
    for lora in (*loras, *(one.checkpoint for one in options.adapters.values())):
        if not Path(lora).exists():
            raise ValueError(f"the LoRA {lora} does not exist")
    for name, control in options.controls.items():
        if not (Path(control.checkpoint) / "config.json").is_file():
            raise ValueError(
                f"the control network {name} has no config.json in {control.checkpoint}; is it a "
                "directory in diffusers' format?"
            )
    if options.controls and class_name not in controls.PIPELINES:
        raise ValueError(f"{class_name} does not support control networks")
    if (reference := options.reference) is not None:
        for path in (Path(reference.checkpoint), references.encoder_path(reference)):
            if not path.exists():
                raise ValueError(f"{path} of the reference (IP-Adapter) does not exist")
    if (options.adapters or reference) and options.dtype in QUANTIZED:
        what = "adapters need" if options.adapters else "a reference needs"
        raise ValueError(
            f"{what} weights of 16 or 32 bits; dtype is {options.dtype}: use bfloat16, or add one "
            "LoRA to the weights with `lora`"
        )
    return families, "safety_checker" in index


def further_bytes(options: Options) -> int:
    """Estimate the memory of an entry's weights beside its checkpoint. Raise ``OSError`` or
    ``ValueError`` if they cannot be read."""
    paths = [Path(control.checkpoint) for control in options.controls.values()]
    paths += [Path(adapter.checkpoint) for adapter in options.adapters.values()]
    if options.reference is not None:
        paths += [Path(options.reference.checkpoint), references.encoder_path(options.reference)]
    return sum(weights_estimate(path, options.dtype) for path in paths)


def optional_bytes(spec: ModelSpec, options: Options) -> int:
    """Estimate the memory of the device without which a model can be loaded: that of all parts
    which can wait in host memory, except the largest.

    Raise ``OSError`` or ``ValueError`` if they cannot be read.
    """
    folders = [Path(spec.checkpoint or "") / name for name in PARKED]
    sizes = [weights_estimate(one, options.dtype) for one in folders if one.is_dir()]
    return sum(sizes) - max(sizes, default=0)


def placement(loaded: LoadedCheckpoint, spec: ModelSpec, options: Options) -> Placement:
    """Measure the memory of a loaded checkpoint's device."""
    total, parking = weights_bytes(loaded), loaded.parking
    resident = total if parking is None else total - parking.bytes + parking.reserved_bytes
    needed = total - optional_bytes(spec, options)
    host = 0 if parking is None else parking.bytes
    return Placement(resident, max(resident - needed, 0), host)


def pipeline_class_of(path: Path) -> str:
    """Return the pipeline class named in a checkpoint. Raise ``ValueError`` if there is none."""
    index = path / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{path} has no model_index.json; is it a directory in diffusers' format?")
    try:
        return str(json.loads(index.read_text())["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} cannot be read: {error}") from error


def _load_pipeline(
    path: Path, family: PipelineFamily, options: Options, *, has_checker: bool
) -> Any:
    is_own = family.module != "diffusers"
    pipeline_class = family.load_class() if is_own else DiffusionPipeline
    for module in (diffusers_logging, transformers_logging):
        library: Any = module
        library.set_verbosity_error()
        library.disable_progress_bar()
    settings: dict[str, Any] = {
        "dtype": options.torch_dtype,
        "local_files_only": True,
        "use_safetensors": True,
    }
    if has_checker and not options.safety:
        settings |= {"safety_checker": None, "requires_safety_checker": False}
    try:
        pipeline = pipeline_class.from_pretrained(str(path), **settings)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(requires_grad=False)
    return pipeline


def _add_loras(pipeline: Any, options: Options) -> None:
    """Merge LoRA weights into the denoiser. Raise ``ValueError`` if they do not fit."""
    for lora in options.lora:
        adapters.load_weights(pipeline, Path(lora.checkpoint))
        pipeline.fuse_lora(lora_scale=lora.scale)
        pipeline.unload_lora_weights()


def _keep_vae_in_float32(pipeline: Any) -> None:
    """Keep an autoencoder that would overflow in 16 bits in float32.

    Pipelines would otherwise cast it back and forth around each use, while other runs use it too.
    """
    vae = getattr(pipeline, "vae", None)
    if vae is not None and hasattr(pipeline, "upcast_vae") and vae.config.force_upcast:
        vae.to(torch.float32)
        vae.register_to_config(force_upcast=False)


def _place(pipeline: Any, device: torch.device, room_bytes: int | None) -> Parking | None:
    """Move a pipeline to the device, or park what is used once in a request if room is lacking."""
    modules = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }
    parked = {name: part for name, part in modules.items() if name in PARKED}
    total = weights_bytes(list(modules.values()))
    if room_bytes is None or total <= room_bytes or not parked:
        pipeline.to(device)
        return None
    for name, part in modules.items():
        if name not in parked:
            part.to(device)
    parking = Parking(device, room_bytes - total + weights_bytes(list(parked.values())))
    for part in parked.values():
        parking.add(part)
    return parking


def _add_batch_points(
    pipeline: Any,
    batcher: CooperativeBatcher,
    tiling: int | None,
    refer: references.ReferenceSwitch | None,
    parking: Parking | None,
) -> None:
    """Make every forward of the pipeline's components a batch point."""
    for name in DENOISERS:
        if (part := getattr(pipeline, name, None)) is not None:
            make_point = partial(
                batcher.batch_point,
                name,
                phase="forward",
                module=part,
                switch=_switch(part, refer),
            )
            part.forward = text_lengths.join(part, part.forward, make_point)
    for name in (*ENCODERS, "connectors"):
        if (part := getattr(pipeline, name, None)) is not None:
            encode_at = _encode_at(batcher, name, part, _bring(parking, part))
            part.forward = encode_at if parking is None else parking.here(encode_at)
    if (audio_vae := getattr(pipeline, "audio_vae", None)) is not None:
        audio_vae.decode = batcher.batch_point(
            "audio_vae", audio_vae.decode, "postprocess", module=audio_vae
        )
    if (vocoder := getattr(pipeline, "vocoder", None)) is not None:
        vocoder.forward = batcher.batch_point(
            "vocoder", vocoder.forward, "postprocess", module=vocoder
        )
    if (vae := getattr(pipeline, "vae", None)) is not None:
        encode = autoencoder.bound(vae, vae.encode, tiling, decodes=False)
        decode = autoencoder.bound(vae, vae.decode, tiling, decodes=True)
        make_point = partial(batcher.batch_point, "vae", module=vae, bring=_bring(parking, vae))
        vae.encode = make_point(encode, "preprocess")
        vae.decode = make_point(decode, "postprocess")
        if parking is not None:
            vae.encode, vae.decode = parking.here(vae.encode), parking.here(vae.decode)


def _switch(
    part: Any, refer: references.ReferenceSwitch | None = None
) -> Callable[[Variant | None], None]:
    """Return what prepares a network for the variant of a batch."""
    adapt = adapters.Switch(part)

    def switch(variant: Variant | None) -> None:
        variant = variant or Variant()
        adapt(variant.adapters)
        if refer is not None:
            refer(variant.reference)

    return switch


def _bring(parking: Parking | None, part: Any) -> Callable[[], None] | None:
    return None if parking is None or not parking.has(part) else partial(parking.bring, part)


def _encode_at(
    batcher: CooperativeBatcher, name: str, part: Any, bring: Callable[[], None] | None
) -> Callable[..., Any]:
    """Make an encoder's forward a batch point. Texts with images have no rows and run alone."""
    make_point = partial(
        batcher.batch_point,
        name,
        part.forward,
        "preprocess",
        module=part,
        switch=_switch(part),
        bring=bring,
    )
    encode, alone = make_point(), make_point(batched=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        has_images = "input_ids" in kwargs and kwargs.get("pixel_values") is not None
        return (alone if has_images else encode)(*args, **kwargs)

    return forward


def _share_components(pipeline: Any, pipeline_class: Any, **more: Any) -> Any:
    """Create another pipeline over the same components, without loading or casting them again.

    ``more``: components that only the other one has.
    """
    expected, optional = pipeline_class._get_signature_keys(pipeline_class)
    components = {
        name: part
        for name, part in pipeline.components.items()
        if name in expected or name in optional
    }
    settings = {
        name: value for name, value in pipeline.config.items() if name in optional and value
    }
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    return pipeline_class(**{**settings, **components, **more})
