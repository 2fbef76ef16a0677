"""The schedulers that a catalog entry can name and, if it lists them, a client can choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import diffusers
import torch

_NOISE: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ddim": ("DDIMScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}
_FLOW: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "dpm++": (
        "DPMSolverMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    ),
    "unipc": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    ),
}
"""Schedulers for rectified flow, which has a time from 0 to 1 instead of noise levels."""
_COGVIDEO: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ddim": ("CogVideoXDDIMScheduler", {}),
    "dpm++": ("CogVideoXDPMScheduler", {}),
}
"""Schedulers with CogVideoX's own noise levels."""


def is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    return type(scheduler).__name__.startswith("FlowMatch") or bool(
        config.get("use_flow_sigmas", False)
    )


def choose(scheduler: Any, name: str | None) -> Any:
    """Create a scheduler of the pipeline's class, or one by name with the same noise levels.

    Raise ``ValueError`` if the name is unknown.
    """
    config = scheduler.config
    if name is None:
        return type(scheduler).from_config(config)
    flow = is_flow(scheduler)
    schedulers = _FLOW if flow else _NOISE
    if type(scheduler).__name__.startswith("CogVideoX"):
        schedulers = _COGVIDEO
    if name not in schedulers:
        raise ValueError(f"scheduler is {name!r}; this model supports {', '.join(schedulers)}")
    class_name, settings = schedulers[name]
    settings = dict(settings)
    if flow and name != "euler" and config.get("flow_shift") is None:
        settings["flow_shift"] = config.get("shift", 1.0)
    return getattr(diffusers, class_name).from_config(config, **settings)


def step_inputs(scheduler: Any, args: Sequence[Any]) -> tuple[Any, torch.Tensor]:
    """Return timestep and noisy latents among the arguments of ``step`` after the output."""
    if type(scheduler).__name__ == "CogVideoXDPMScheduler":  # it takes its last estimate first
        _, timestep, _, noisy = args[:4]
    else:
        timestep, noisy = args[:2]
    return timestep, noisy


def predict_clean(
    scheduler: Any, output: torch.Tensor, noisy: torch.Tensor, timestep: Any
) -> torch.Tensor:
    """Compute the clean latents that a denoiser's output predicts, for previews."""
    if is_flow(scheduler):
        time = float(timestep) / float(scheduler.config.num_train_timesteps)
        return noisy - time * output
    alpha: torch.Tensor = scheduler.alphas_cumprod.to(noisy.device)[int(timestep)]
    prediction_type = scheduler.config.prediction_type
    if type(scheduler).__name__.startswith("Euler"):
        sigma = ((1 - alpha) / alpha) ** 0.5
        noisy = noisy / (sigma**2 + 1) ** 0.5
    if prediction_type == "sample":
        return output
    if prediction_type == "v_prediction":
        return alpha.sqrt() * noisy - (1 - alpha).sqrt() * output
    return (noisy - (1 - alpha).sqrt() * output) / alpha.sqrt()
