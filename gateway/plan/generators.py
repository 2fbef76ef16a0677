"""Models of pictures, video and audio: which networks run how often for one result.

Read from a checkpoint's configurations, or from ``generators.yaml``; needs no torch. All problems
are raised as ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gateway.catalog.tasks import Task
from gateway.plan.networks.audio import csm_work, musicgen_work
from gateway.plan.networks.autoencoders import kl_work, tiny_work, wan_video_work
from gateway.plan.networks.diffusion_transformers import flux_work, ltx_work, sd3_work, wan_work
from gateway.plan.networks.encoders import clip_work, t5_work
from gateway.plan.networks.sentence_speech import conformer_work, frame_rate, vocoder_work
from gateway.plan.networks.tally import Config, Unknown, Work
from gateway.plan.networks.unet import unet_work
from gateway.plan.networks.upscaler import compact_work
from gateway.plan.shapes import count_parameters, plain_name, read_config, stored_precision

_FILE: Final = Path(__file__).with_name("generators.yaml")
_TEXT: Final[Mapping[str, int]] = {
    # Tokens of a prompt, to which the pipelines pad.
    "PocketImagePipeline": 32,
    "PocketVideoPipeline": 32,
    "StableDiffusion3Pipeline": 77 + 256,  # of CLIP, and of T5
    "FluxPipeline": 512,
    "FluxFillPipeline": 512,
    "FluxKontextPipeline": 512,
    "WanPipeline": 512,
    "WanImageToVideoPipeline": 512,
    "LTXPipeline": 128,
}
_TEXT_DEFAULT: Final = 77
_DISTILLED: Final = ("FluxPipeline", "FluxFillPipeline", "FluxKontextPipeline")
"""Pipelines whose guidance is an input of the network and takes no further pass."""
_SENTENCES: Final = ("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan")
_PHONEMES: Final = 15
"""Phonemes of a second of speech."""
_CSM_FRAMES: Final = 12.5
"""Frames per second of the codec Mimi."""


@dataclass(frozen=True, slots=True)
class NetworkPart:
    """A network of a model: its weights, the operations of one pass, and passes for a result."""

    name: str
    parameters: int
    operations: int | None
    """None if they cannot be computed from the configuration."""
    runs: int


@dataclass(frozen=True, slots=True)
class ResultOrder:
    """One result that a plan is for. What a task does not have is ignored."""

    width: int
    height: int
    seconds: float
    fps: float
    steps: int
    guidance: float

    def __post_init__(self) -> None:
        for name in ("width", "height", "steps", "seconds", "fps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def frames(self) -> int:
        return max(1, round(self.seconds * self.fps))


@dataclass(frozen=True, slots=True)
class Generator:
    """A model that is not a language model, by the configurations of its networks."""

    pipeline: str
    """Class of the pipeline, or ``model_type`` of a checkpoint with one configuration."""
    networks: Mapping[str, Config]
    source: str
    task: Task | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    """What a result of a well-known model usually is."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Weights by network, as counted in the files."""
    precision: str | None = None

    def parts(self, order: ResultOrder, task: str) -> tuple[NetworkPart, ...]:
        """Return the networks with the passes that one result takes.

        Raise ``ValueError`` if a configuration lacks what they depend on.
        """
        try:
            return self._parts(order, task)
        except KeyError as error:
            raise ValueError(f"the configuration of {self.pipeline} has no {error}") from None
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"the configuration of {self.pipeline} is invalid: {error}") from None

    def _parts(self, order: ResultOrder, task: str) -> tuple[NetworkPart, ...]:
        if self.pipeline == "musicgen":
            return tuple(_musicgen(self, order))
        if self.pipeline == "csm":
            return tuple(_csm(self, order))
        if self.pipeline in _SENTENCES and "vocoder" in self.networks:
            return tuple(_sentences(self, order))
        if self.pipeline == "compact":
            return (_compact(self, order, task),)
        if "vae" in self.networks:
            return tuple(_diffusion(self, order, task))
        return tuple(self.uncounted(name) for name in self.networks)

    def uncounted(self, name: str, runs: int = 1) -> NetworkPart:
        """Return a part whose operations cannot be computed."""
        parameters = self.counted.get(name)
        if parameters is None:
            raise ValueError(f"the weights of {name or self.pipeline} are not there to be counted")
        return NetworkPart(name or self.pipeline, parameters, None, runs)

    def part(self, name: str, work: Callable[[Config], Work], runs: int) -> NetworkPart:
        """Return a network's part; without operations if they cannot be computed."""
        try:
            found = work(self.networks[name])
        except (Unknown, KeyError, TypeError):
            return self.uncounted(name, runs)
        return NetworkPart(name, found.parameters, found.operations, runs)


# --- Where a generator comes from -----------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pipeline: str
    task: Task
    order: dict[str, Any]
    networks: dict[str, dict[str, Any]]
    aliases: list[str] = []


@cache
def generators() -> Mapping[str, Generator]:
    """Return the table of well-known models, with their aliases."""
    document = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    found: dict[str, Generator] = {}
    for name, row in msgspec.convert(document, dict[str, _Row]).items():
        made = Generator(
            row.pipeline,
            row.networks,
            "configurations from tollgate's table, not weights",
            row.task,
            row.order,
            precision="bfloat16",
        )
        found |= dict.fromkeys((name, *row.aliases), made)
    return found


def find_generator(name: str) -> Generator | None:
    """Find a model in the table; the owner and suffixes such as ``-diffusers`` are optional."""
    return generators().get(plain_name(name).removesuffix("-diffusers"))


def read_generator(path: Path) -> Generator:
    """Read a checkpoint directory of diffusers or transformers, or one of our own."""
    if not (path / "model_index.json").is_file():
        return _read_single(path)
    index = read_config(path / "model_index.json")
    networks, counted = {}, {}
    for name in index:
        if (path / name / "config.json").is_file():
            networks[name] = read_config(path / name / "config.json")
            counted[name] = _count(path / name)
    return Generator(
        str(index.get("_class_name")),
        networks,
        f"computed from {path}",
        counted={name: count for name, count in counted.items() if count},
        precision=next(filter(None, map(stored_precision, networks.values())), None),
    )


def _read_single(path: Path) -> Generator:
    """Read a checkpoint with one configuration, and that of its vocoder if it has one."""
    config = read_config(path / "config.json")
    kind = config.get("model_type") or config.get("architecture") or "unknown"
    networks, counted = {"": config}, {"": _count(path)}
    if kind == "fastspeech2_conformer_with_hifigan":
        networks = {"": config["model_config"], "vocoder": config["vocoder_config"]}
    elif (path / "vocoder" / "config.json").is_file():
        networks["vocoder"] = read_config(path / "vocoder" / "config.json")
        counted["vocoder"] = _count(path / "vocoder")
        counted[""] -= counted["vocoder"]
    return Generator(
        str(kind),
        networks,
        f"computed from {path}",
        counted={name: count for name, count in counted.items() if count},
        precision=stored_precision(config),
    )


def _count(path: Path) -> int:
    """Return the weights in a directory and below it; 0 if it has none. Tables of other numbers are
    not counted."""
    folders = {file.parent for file in path.rglob("*.safetensors")}
    return sum(count_parameters(folder, skip_packed=True)[0] for folder in folders)


# --- What a result takes --------------------------------------------------------------------------


def _diffusion(model: Generator, order: ResultOrder, task: str) -> Iterator[NetworkPart]:
    vae = model.networks["vae"]
    frames = order.frames if task.endswith("-video") else 1
    spatial, temporal = _scales(vae)
    width, height = order.width // spatial, order.height // spatial
    text = _TEXT.get(model.pipeline, _TEXT_DEFAULT)
    guided = order.guidance > 1 and model.pipeline not in _DISTILLED
    passes = 2 if guided else 1
    if guided and model.pipeline == "StableDiffusionInstructPix2PixPipeline":
        passes = 3  # without the picture, without both, with both
    encoded = 2 if guided else 1

    def denoise(config: Config) -> Work:
        grid = math.ceil((frames - 1) / temporal) + 1
        match config.get("_class_name"):
            case "UNet2DConditionModel":
                return unet_work(config, width=width, height=height, text=text)
            case "FluxTransformer2DModel":
                return flux_work(config, positions=(width // 2) * (height // 2), text=text)
            case "SD3Transformer2DModel":
                side = config["patch_size"]
                return sd3_work(config, positions=(width // side) * (height // side), text=text)
            case "WanTransformer3DModel":
                _, *patch = config["patch_size"]
                positions = grid * (width // patch[0]) * (height // patch[1])
                return wan_work(config, positions=positions, text=text)
            case "LTXVideoTransformer3DModel":
                return ltx_work(config, positions=grid * width * height, text=text)
        raise Unknown(f"denoiser {config.get('_class_name')}")

    def encode(config: Config) -> Work:
        name = str((config.get("architectures") or [""])[0])
        if name.startswith("CLIPTextModel"):
            return clip_work(config, text=text, projected=name.endswith("WithProjection"))
        if name in ("T5EncoderModel", "UMT5EncoderModel"):
            is_sd3 = model.pipeline == "StableDiffusion3Pipeline"
            return t5_work(config, text=text - _TEXT_DEFAULT if is_sd3 else text)
        raise Unknown(f"encoder {name}")

    for name in model.networks:
        if name in ("unet", "transformer"):
            clips = _clips(model.networks[name], vae, frames, temporal)
            yield model.part(name, denoise, order.steps * passes * clips)
        elif name == "transformer_2":
            # Of two experts, each makes a part of the steps, so that the first counts them all.
            yield model.part(name, denoise, 0)
        elif name.startswith("text_encoder"):
            yield model.part(name, encode, encoded)
        elif name == "vae":
            yield _autoencoder(model, order, frames, reads=not task.startswith("text-to-"))
        elif model.counted.get(name):
            yield model.uncounted(name)


def _scales(vae: Config) -> tuple[int, int]:
    """Return by how much an autoencoder reduces sides, and the number of frames."""
    match vae.get("_class_name"):
        case "AutoencoderKLWan":
            return vae.get("scale_factor_spatial") or 8, vae.get("scale_factor_temporal") or 4
        case "AutoencoderKLLTXVideo":
            return (
                vae.get("spatial_compression_ratio") or 32,
                vae.get("temporal_compression_ratio") or 8,
            )
        case "AutoencoderTiny":
            return 2 ** (len(vae["decoder_block_out_channels"]) - 1), 1
    return 2 ** (len(vae.get("block_out_channels", (1, 1, 1, 1))) - 1), 1


def _clips(denoiser: Config, vae: Config, frames: int, temporal: int) -> int:
    """Return the passes in which all frames are denoised; our own model makes clips of a few."""
    if temporal > 1 or frames == 1:
        return 1
    clip: int = denoiser["out_channels"] // vae["latent_channels"]
    return math.ceil(frames / max(1, clip))


def _autoencoder(model: Generator, order: ResultOrder, frames: int, *, reads: bool) -> NetworkPart:
    """Return the autoencoder's part: it decodes each frame, and encodes a source."""

    size = {"width": order.width, "height": order.height}

    def work(config: Config) -> Work:
        decoded = frames
        match config.get("_class_name"):
            case "AutoencoderKL":
                encoder, decoder = kl_work(config, **size)
            case "AutoencoderTiny":
                encoder, decoder = tiny_work(config, **size)
            case "AutoencoderKLWan":
                # One clip of four frames for each latent but the first. A source is encoded as its
                # first frame.
                whole = -(-(frames - 1) // 4) * 4 + 1
                encoder, decoder = wan_video_work(config, **size, frames=whole)
                decoded = 1
            case name:
                raise Unknown(f"autoencoder {name}")
        operations = decoder.operations * decoded + (encoder.operations if reads else 0)
        return Work(encoder.parameters + decoder.parameters, operations)

    return model.part("vae", work, 1)


def _musicgen(model: Generator, order: ResultOrder) -> Iterator[NetworkPart]:
    codec = model.networks[""]["audio_encoder"]
    rate = codec["sampling_rate"] / math.prod(codec["upsampling_ratios"])
    work = musicgen_work(model.networks[""])
    # Guidance doubles the batch, whose weights are read once.
    rows = 2 if order.guidance > 1 else 1
    delay = model.networks[""]["decoder"]["num_codebooks"] - 1
    runs = math.ceil(order.seconds * rate) + delay
    yield NetworkPart("decoder", work.parameters, rows * work.operations, runs)


def _csm(model: Generator, order: ResultOrder) -> Iterator[NetworkPart]:
    config = model.networks[""]
    backbone, depth = csm_work(config)
    frames = math.ceil(order.seconds * _CSM_FRAMES)
    yield NetworkPart("backbone", backbone.parameters, backbone.operations, frames)
    codebooks = config["num_codebooks"] - 1
    yield NetworkPart("depth decoder", depth.parameters, depth.operations, frames * codebooks)


def _sentences(model: Generator, order: ResultOrder) -> Iterator[NetworkPart]:
    frames = math.ceil(order.seconds * frame_rate(model.networks["vocoder"]))
    phonemes = math.ceil(order.seconds * _PHONEMES)
    work = conformer_work(model.networks[""], phonemes=phonemes, frames=frames)
    yield NetworkPart("network", work.parameters, work.operations, 1)
    yield model.part("vocoder", lambda config: vocoder_work(config, frames=frames), 1)


def _compact(model: Generator, order: ResultOrder, task: str) -> NetworkPart:
    frames = order.frames if task == "video-upscale" else 1
    work = compact_work(model.networks[""], pixels=order.width * order.height)
    return NetworkPart("network", work.parameters, work.operations, frames)
