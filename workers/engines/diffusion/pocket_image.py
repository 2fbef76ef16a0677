"""The pocket image model as one diffusers pipeline: text to image, and six ways to change images.

The denoiser's input is the noisy latents, the latents of up to two source images and two
coordinates, concatenated on channels; a missing source is zeros. It predicts the clean latents
(x-prediction); the velocity that schedulers for rectified flow expect is derived from them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderTiny, DiffusionPipeline, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from transformers import PreTrainedTokenizerFast, T5EncoderModel

SOURCES: Final = 2
COORDINATES: Final = 2
TEXT_TOKENS: Final = 32
SIGMA_MIN: Final = 0.02
"""Lower bound of the divisor; the velocity would be a quotient of two small numbers."""


def coordinates(height: int, width: int) -> torch.Tensor:
    """Return the position of each latent pixel, from -1 to 1: (1, 2, height, width)."""
    x = torch.linspace(-1, 1, width)[None, :].expand(height, width)
    y = torch.linspace(-1, 1, height)[:, None].expand(height, width)
    return torch.stack([x, y])[None]


def encode_text(
    tokenizer: Any, text_encoder: Any, texts: list[str], *, padding: str = "max_length"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode texts. Return states (B, TEXT_TOKENS, D), their mask (B, TEXT_TOKENS), and a summary
    of each text (B, D), the state of its last token."""
    tokens = tokenizer(
        texts, padding=padding, truncation=True, max_length=TEXT_TOKENS, return_tensors="pt"
    ).to(text_encoder.device)
    states = text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    end = tokens.attention_mask.sum(1) - 1
    return states, tokens.attention_mask, states[torch.arange(len(texts)), end]


class PocketPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Base of the image and the video pipeline.

    Components are classes of diffusers and transformers, loaded by ``from_pretrained``.
    """

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

    def encode_image(self, image: Any, height: int, width: int) -> torch.Tensor:
        pixels = self.image_processor.preprocess(image, height=height, width=width)
        pixels = pixels.to(self.device, self.vae.dtype)
        latents: torch.Tensor = self.vae.encode(pixels).latents
        return (latents - self._shift) * self._scale

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Return pixels (B, 3, H, W), about from -1 to 1."""
        pixels: torch.Tensor = self.vae.decode(
            latents / self._scale + self._shift, return_dict=False
        )[0]
        return pixels

    @property
    def _shift(self) -> float:
        return float(self.vae.config.shift_factor)

    @property
    def _scale(self) -> float:
        return float(self.vae.config.scaling_factor)

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Return height and width, by default native. Raise ``ValueError`` if not supported."""
        side = int(self.unet.config.sample_size) * self.vae_scale_factor
        height, width = height or side, width or side
        if height % self.vae_scale_factor or width % self.vae_scale_factor:
            raise ValueError(f"height and width must be multiples of {self.vae_scale_factor}")
        return height, width

    def _encode_prompt(
        self, prompt: str, negative_prompt: str, guidance_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode the negative prompt and the prompt; only the prompt without guidance, at 1."""
        texts = [prompt] if guidance_scale == 1.0 else [negative_prompt, prompt]
        return encode_text(self.tokenizer, self.text_encoder, texts)

    def _noise(self, height: int, width: int, generator: torch.Generator | None) -> torch.Tensor:
        """Return noise (1, C, h, w) for all output channels of the denoiser."""
        factor = self.vae_scale_factor
        noise: torch.Tensor = randn_tensor(
            (1, int(self.unet.config.out_channels), height // factor, width // factor),
            generator=generator,
            device=self._execution_device,
            dtype=self.unet.dtype,
        )
        return noise

    def _denoise(
        self,
        latents: torch.Tensor,
        sources: list[torch.Tensor],
        text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        timesteps: torch.Tensor,
        guidance_scale: float,
    ) -> torch.Tensor:
        """Denoise latents, conditioned on the sources and the text."""
        states, mask, summary = text
        position = coordinates(*latents.shape[2:]).to(latents)
        conditions = torch.cat([*sources, position], 1)
        with self.progress_bar(total=len(timesteps)) as bar:
            for timestep in timesteps:
                unet_input = torch.cat([latents, conditions], 1).expand(len(states), -1, -1, -1)
                clean = self.unet(
                    unet_input,
                    timestep.expand(len(states)).to(unet_input.dtype),
                    encoder_hidden_states=states,
                    encoder_attention_mask=mask,
                    class_labels=summary,
                    return_dict=False,
                )[0]
                if len(states) > 1:
                    unconditional, conditional = clean.chunk(2)
                    clean = unconditional + guidance_scale * (conditional - unconditional)
                sigma = (timestep / self.scheduler.config.num_train_timesteps).clamp(min=SIGMA_MIN)
                velocity = (latents - clean) / sigma
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                bar.update()
        return latents


class PocketImagePipeline(PocketPipeline):
    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        image: Image.Image | list[Image.Image] | None = None,
        strength: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 20,
        guidance_scale: float = 3.0,
        negative_prompt: str = "",
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Generate an image, or edit ``image`` (at most two) as the prompt describes.

        With a ``strength`` below 1, noise is added to the first image instead, and the prompt
        describes the result. ``guidance_scale`` 1 takes one forward per step, any other two. Raise
        ``ValueError`` if the size is not a multiple of the scale factor.
        """
        height, width = self._size(height, width)
        images = [] if image is None else image if isinstance(image, list) else [image]
        text = self._encode_prompt(prompt, negative_prompt, guidance_scale)
        noise = self._noise(height, width, generator)
        encoded = [self.encode_image(one, height, width) for one in images[:SOURCES]]
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        timesteps = self.scheduler.timesteps
        latents = noise
        if encoded and strength < 1.0:
            skipped = num_inference_steps - max(1, round(num_inference_steps * strength))
            timesteps = timesteps[skipped * self.scheduler.order :]
            self.scheduler.set_begin_index(skipped * self.scheduler.order)
            sigma = self.scheduler.sigmas[skipped * self.scheduler.order]
            latents = (1 - sigma) * encoded[0] + sigma * noise
            encoded = []
        sources = [*encoded, *[torch.zeros_like(noise)] * (SOURCES - len(encoded))]
        latents = self._denoise(latents, sources, text, timesteps, guidance_scale)
        if output_type == "latent":
            return ImagePipelineOutput(images=latents)
        output: list[Image.Image] | np.ndarray = self.image_processor.postprocess(
            self.decode_latents(latents), output_type=output_type
        )
        return ImagePipelineOutput(images=output)
