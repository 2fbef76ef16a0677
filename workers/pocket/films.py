"""The pocket video model as one diffusers pipeline: from words, or from words and a first frame.

The frames of a clip lie side by side on the denoiser's channels, behind them the latents of the
first frame, if it is given, and two coordinates. It predicts the clean latents (x-prediction). A
longer video is made clip by clip, each from the last frame of the one before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny, DiffusionPipeline, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from workers.pocket.pictures import SIGMA_MIN, coordinates, encode_text


class VideoOutput(BaseOutput):  # type: ignore[misc]
    """``frames``: of one video, (1, T, H, W, 3) from 0 to 1, or (1, T, 3, H, W) as a tensor."""

    frames: np.ndarray | torch.Tensor


class PocketVideoPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Components are diffusers' and transformers' own classes, read by ``from_pretrained``."""

    model_cpu_offload_seq = "text_encoder->unet->vae"

    def __init__(
        self,
        vae: AutoencoderTiny,
        text_encoder: T5EncoderModel,
        tokenizer: PreTrainedTokenizerFast,
        unet: UNet2DConditionModel,
        scheduler: Any,
    ) -> None:
        super().__init__()
        self.register_modules(
            vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler
        )
        self.vae_scale_factor = 2 ** (len(vae.config.encoder_block_out_channels) - 1)
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)

    @property
    def clip_frames(self) -> int:
        """Frames that are made at once."""
        return int(self.unet.config.out_channels) // int(self.vae.config.latent_channels)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        image: Image.Image | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int = 20,
        guidance_scale: float = 3.0,
        negative_prompt: str = "",
        generator: torch.Generator | None = None,
        output_type: str = "np",
    ) -> VideoOutput:
        """Make a video of ``num_frames``, of which ``image`` is the first.

        ``guidance_scale`` 1 looks at the prompt once a step, any other twice. ``output_type`` is
        ``np`` or ``pt``. Raise ``ValueError`` for a size that is no multiple of the scale factor.
        """
        side = int(self.unet.config.sample_size) * self.vae_scale_factor
        height, width = height or side, width or side
        if height % self.vae_scale_factor or width % self.vae_scale_factor:
            raise ValueError(f"height and width must be multiples of {self.vae_scale_factor}")
        guided = guidance_scale != 1.0
        texts = [negative_prompt, prompt] if guided else [prompt]
        words = encode_text(self.tokenizer, self.text_encoder, texts)
        first = None
        if image is not None:
            pixels = self.image_processor.preprocess(image, height=height, width=width)
            first = self._normed(self.vae.encode(pixels.to(self.device, self.vae.dtype)).latents)
        wanted = num_frames or self.clip_frames
        clips: list[torch.Tensor] = []
        made = 0
        while made < wanted:
            latents = self._clip(
                words,
                first,
                (height // self.vae_scale_factor, width // self.vae_scale_factor),
                num_inference_steps,
                guidance_scale,
                generator,
            )
            fresh = latents[1:] if clips else latents
            clips.append(fresh)
            made += len(fresh)
            first = latents[-1:]
        frames = torch.cat(clips)[:wanted]
        scale, shift = self.vae.config.scaling_factor, self.vae.config.shift_factor
        drawn = self.vae.decode(frames / scale + shift, return_dict=False)[0]
        pictures = (drawn.float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return VideoOutput(frames=pictures[None])
        return VideoOutput(frames=pictures.permute(0, 2, 3, 1).cpu().numpy()[None])

    def _normed(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.vae.config
        return (latents - float(config.shift_factor)) * float(config.scaling_factor)

    def _clip(
        self,
        words: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        first: torch.Tensor | None,
        size: tuple[int, int],
        steps: int,
        guidance_scale: float,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """Denoise one clip: (frames, channels, height, width)."""
        states, mask, summary = words
        channels = int(self.vae.config.latent_channels)
        latents = randn_tensor(
            (1, self.clip_frames * channels, *size),
            generator=generator,
            device=self._execution_device,
            dtype=self.unet.dtype,
        )
        given = torch.zeros(1, channels, *size).to(latents) if first is None else first
        fixed = torch.cat([given, coordinates(*size).to(latents)], 1)
        self.scheduler.set_timesteps(steps, device=self._execution_device)
        with self.progress_bar(total=len(self.scheduler.timesteps)) as bar:
            for timestep in self.scheduler.timesteps:
                seen = torch.cat([latents, fixed], 1).expand(len(states), -1, -1, -1)
                clean = self.unet(
                    seen,
                    timestep.expand(len(states)).to(seen.dtype),
                    encoder_hidden_states=states,
                    encoder_attention_mask=mask,
                    class_labels=summary,
                    return_dict=False,
                )[0]
                if len(states) > 1:
                    without, with_ = clean.chunk(2)
                    clean = without + guidance_scale * (with_ - without)
                sigma = (timestep / self.scheduler.config.num_train_timesteps).clamp(min=SIGMA_MIN)
                velocity = (latents - clean) / sigma
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                bar.update()
        frames: torch.Tensor = latents.view(self.clip_frames, channels, *size)
        if first is not None:
            frames = torch.cat([first, frames[1:]])
        return frames
