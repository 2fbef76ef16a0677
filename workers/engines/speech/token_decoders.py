"""The token loops of CSM, Dia and MusicGen: how a frame is sampled, and how it is run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from workers.engines.speech.token_loop import Edit, Frame, Sampling, TokenLoop, last_hidden


class CsmLoop(TokenLoop):
    """The backbone gives a frame's first token; a depth decoder gives the others, one by one."""

    def __init__(self, model: Any) -> None:
        super().__init__(codebooks=model.config.num_codebooks)
        self._model = model
        self._first, self._others = Sampling(model), Sampling(model.depth_decoder)
        if model.depth_decoder.generation_config.eos_token_id is not None:
            raise ValueError("its depth decoder has an eos_token_id, which is not supported")

    @property
    def module(self) -> torch.nn.Module:
        model: torch.nn.Module = self._model.backbone_model
        return model

    def sample(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = self._model.lm_head(hidden)
        frame = [self._first.choose(scores[None, :, None], keys)]
        ids = torch.nn.functional.pad(frame[0].clamp_min(0), (1, 0))
        given = {"backbone_last_hidden_state": hidden}
        cache = DynamicCache()
        for codebook in range(1, self.codebooks):
            found = self._model.depth_decoder(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **given
            )
            frame.append(self._others.choose(found.logits[None], keys, first=codebook))
            ids, given = frame[-1].clamp_min(0), {}
        return torch.cat(frame, dim=1)

    def run(
        self,
        frames: torch.Tensor,
        places: torch.Tensor,
        *,
        mask: torch.Tensor,
        text: torch.Tensor | None,
    ) -> torch.Tensor:
        found = self._model.backbone_model(
            input_ids=frames[:, None],
            attention_mask=mask,
            position_ids=places[:, None],
            past_key_values=self.caches,
            use_cache=True,
        )
        return last_hidden(found.last_hidden_state)


class DiaLoop(TokenLoop):
    """One decoder gives all tokens of a frame; with guidance, a second lane reads no text."""

    def __init__(self, model: Any) -> None:
        self._sampling = Sampling(model)
        self._config = model.config.decoder_config
        self._delays = list(model.config.delay_pattern)
        super().__init__(
            codebooks=len(self._delays), lanes=1 + self._sampling.is_guided, has_text=True
        )
        self._model = model

    @property
    def module(self) -> torch.nn.Module:
        model: torch.nn.Module = self._model.model.decoder
        return model

    def prefill(self, inputs: Any, frames: int) -> tuple[Any, torch.Tensor, Edit]:
        """Run a prompt. Return what is known of it, and how its ``frames`` continue."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self._lanes > 1:
            ids, mask = torch.cat([ids, torch.zeros_like(ids)]), mask.repeat(2, 1)
        encoded = self._model.model.encoder(input_ids=ids, attention_mask=mask)
        given = inputs["decoder_input_ids"].long()
        length = given.shape[1] - int((given[0, :, 0] == self._config.pad_token_id).sum())
        prompt = given[:, :length]
        found = self._model.model.decoder(
            input_ids=prompt.repeat(self._lanes, 1, 1),
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=mask,
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            use_cache=True,
        )
        edit = self._continue(given[0, length:].tolist(), frames)
        return found.past_key_values, last_hidden(found.last_hidden_state), edit

    def _continue(self, given: list[Frame], frames: int) -> Edit:
        """Begin with the delayed tokens of the prompt; end each codebook after its delay."""
        pad, end = self._config.pad_token_id, self._config.eos_token_id
        ended_at: int | None = None

        def edit(step: int, frame: Frame) -> Frame:
            nonlocal ended_at
            ended = ended_at
            if ended is None and (frame[0] == end or step == frames):
                ended = ended_at = step
            if ended is not None:
                frame = [
                    token if (left := ended + delay - step) > 0 else end if left == 0 else pad
                    for token, delay in zip(frame, self._delays, strict=True)
                ]
            if step < len(given):
                frame = [
                    token if known == pad else known
                    for token, known in zip(frame, given[step], strict=True)
                ]
            return frame

        return edit

    def sample(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = self._model.logits_dense(hidden)
        shape = (len(keys), self._lanes, self.codebooks, self._config.vocab_size)
        return self._sampling.choose(scores.view(shape).transpose(0, 1), keys)

    def run(
        self,
        frames: torch.Tensor,
        places: torch.Tensor,
        *,
        mask: torch.Tensor,
        text: torch.Tensor | None,
    ) -> torch.Tensor:
        found = self._model.model.decoder(
            input_ids=frames[:, None],
            position_ids=places[:, None],
            attention_mask=mask,
            encoder_hidden_states=frames.new_empty(0),  # in the cache
            encoder_attention_mask=text,
            past_key_values=self.caches,
            use_cache=True,
        )
        return last_hidden(found.last_hidden_state)


class MusicgenLoop(TokenLoop):
    """As ``DiaLoop``; positions are added to the embeddings, which the library does for one row."""

    def __init__(self, model: Any) -> None:
        self._sampling = Sampling(model)
        self._config = model.config.decoder
        super().__init__(
            codebooks=self._config.num_codebooks,
            lanes=1 + self._sampling.is_guided,
            has_text=True,
        )
        self._model = model
        self._start = model.generation_config.decoder_start_token_id
        self._pad = model.generation_config.pad_token_id
        self._places: torch.Tensor | None = None
        positions = model.decoder.model.decoder.embed_positions
        self._of_one_row = positions.forward
        positions.forward = self._embed_positions

    def _embed_positions(self, ids: torch.Tensor, past: int = 0) -> torch.Tensor:
        if self._places is None:
            found: torch.Tensor = self._of_one_row(ids, past)
            return found
        positions = self._model.decoder.model.decoder.embed_positions
        if (needed := int(self._places.max()) + 1) > len(positions.weights):
            positions.make_weights(needed, positions.embedding_dim)
        weights: torch.Tensor = positions.weights
        return weights[self._places][:, None]

    @property
    def module(self) -> torch.nn.Module:
        model: torch.nn.Module = self._model.decoder.model.decoder
        return model

    def prefill(self, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        text = self._model.text_encoder(input_ids=ids).last_hidden_state
        if hasattr(self._model, "enc_to_dec_proj"):
            text = self._model.enc_to_dec_proj(text)
        if self._lanes > 1:
            text = torch.cat([text, torch.zeros_like(text)])
        found = self._model.decoder.model.decoder(
            input_ids=torch.full((self._lanes * self.codebooks, 1), self._start).to(ids.device),
            encoder_hidden_states=text,
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            use_cache=True,
        )
        return found.past_key_values, last_hidden(found.last_hidden_state)

    def delay(self, frames: int) -> Edit:
        """Pad each codebook before its first frame, and after its last."""
        return lambda step, frame: [
            token if number <= step < number + frames else self._pad
            for number, token in enumerate(frame)
        ]

    def sample(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = torch.stack([head(hidden) for head in self._model.decoder.lm_heads], dim=1)
        shape = (len(keys), self._lanes, *scores.shape[1:])
        return self._sampling.choose(scores.view(shape).transpose(0, 1), keys)

    def run(
        self,
        frames: torch.Tensor,
        places: torch.Tensor,
        *,
        mask: torch.Tensor,
        text: torch.Tensor | None,
    ) -> torch.Tensor:
        self._places = places
        try:
            found = self._model.decoder.model.decoder(
                input_ids=frames.reshape(-1, 1),
                attention_mask=mask,
                encoder_hidden_states=frames.new_empty(0),  # in the cache
                encoder_attention_mask=text,
                past_key_values=self.caches,
                use_cache=True,
            )
        finally:
            self._places = None
        return last_hidden(found.last_hidden_state)
