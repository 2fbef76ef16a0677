"""The pocket video model as one diffusers pipeline: from text, or from text and a first frame.

The denoiser's channels are the frames of a clip, the latents of the first frame, if given, and two
coordinates. It predicts the clean latents (x-prediction). A longer video is generated clip by clip,
each from the last frame of the one before.
"""

from __future__ import annotations

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image

from workers.engines.diffusion.pocket_image import PocketPipeline


class VideoOutput(BaseOutput):  # type: ignore[misc]
    """``frames`` of one video: (1, T, H, W, 3) from 0 to 1, or (1, T, 3, H, W) as a tensor."""

    frames: np.ndarray | torch.Tensor


class PocketVideoPipeline(PocketPipeline):
    @property
    def clip_frames(self) -> int:
        """Frames in a clip, which are generated together."""
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
        """Generate a video of ``num_frames``, the first of which is ``image``, if given.

        ``guidance_scale`` 1 takes one forward per step, any other two. ``output_type`` is ``np`` or
        ``pt``. Raise ``ValueError`` if the size is not a multiple of the scale factor.
        """
        height, width = self._size(height, width)
        text = self._encode_prompt(prompt, negative_prompt, guidance_scale)
        first = None if image is None else self.encode_image(image, height, width)
        frame_count = num_frames or self.clip_frames
        # A clip that continues another shares a frame with it.
        clips = 1 + max(0, -(-(frame_count - self.clip_frames) // (self.clip_frames - 1)))
        self._num_timesteps = clips * num_inference_steps
        frames: list[torch.Tensor] = []
        for _ in range(clips):
            noise = self._noise(height, width, generator)
            self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
            clip = self._clip(noise, first, text, guidance_scale)
            frames.append(clip[1:] if frames else clip)
            first = clip[-1:]
        pixels = self.decode_latents(torch.cat(frames)[:frame_count])
        images = (pixels.float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return VideoOutput(frames=images[None])
        return VideoOutput(frames=images.permute(0, 2, 3, 1).cpu().numpy()[None])

    def _clip(
        self,
        noise: torch.Tensor,
        first: torch.Tensor | None,
        text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        guidance_scale: float,
    ) -> torch.Tensor:
        """Denoise one clip. Return (frames, channels, height, width)."""
        frames = noise.view(self.clip_frames, -1, *noise.shape[2:])
        condition = torch.zeros_like(frames[:1]) if first is None else first
        latents = self._denoise(noise, [condition], text, self.scheduler.timesteps, guidance_scale)
        frames = latents.view_as(frames)
        if first is not None:
            frames = torch.cat([first, frames[1:]])
        return frames
