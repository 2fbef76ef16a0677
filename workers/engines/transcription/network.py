"""Runs a Whisper network over many windows: the library's encoder, and a decoder with one row of
caches for each window.

Rows ``0`` to ``rows - 1`` are in use and contiguous, so that a step reads the caches without
gathering them. Numerically the decoder is the library's; only its caches differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn import Linear

from workers.engines.interrupting import add_hooks

Encoded: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of encoded windows for each layer's cross-attention, the windows first."""


class WhisperNetwork:
    """A loaded network with caches for ``slots`` windows."""

    def __init__(self, model: Any, slots: int) -> None:
        self.model = model
        config = model.config
        self._decoder = model.model.decoder
        self._heads = int(config.decoder_attention_heads)
        self._head_size = int(config.d_model) // self._heads
        self.positions = int(config.max_target_positions)
        """Maximum number of tokens in a window, with its prefix."""
        self.frames = 2 * int(config.max_source_positions)
        """Number of frames of the features in a window."""
        self.median_width = int(config.median_filter_width)
        weight = model.proj_out.weight
        shape = (len(self._decoder.layers), slots, self._heads)
        made = {"dtype": weight.dtype, "device": weight.device}
        self.device = weight.device
        add_hooks(model, also=self._pauses())
        sizes = (self.positions, int(config.max_source_positions))
        self._own, self._cross = (
            [torch.zeros(*shape, size, self._head_size, **made) for _ in range(2)] for size in sizes
        )
        self.rows = 0

    @property
    def cache_bytes(self) -> int:
        return sum(cache.numel() * cache.element_size() for cache in (*self._own, *self._cross))

    def encode(self, windows: Sequence[torch.Tensor]) -> Encoded:
        """Encode features ``(mel, frames)``. May be interrupted between the layers."""
        features = torch.stack(list(windows)).to(self.device, self.model.proj_out.weight.dtype)
        hidden = self.model.model.encoder(features).last_hidden_state
        crossing = [layer.encoder_attn for layer in self._decoder.layers]
        return [
            (self._split(one.k_proj(hidden)), self._split(one.v_proj(hidden))) for one in crossing
        ]

    def _pauses(self) -> list[torch.nn.Module]:
        """Return where encoding can be interrupted beside the beginnings of layers. On a CPU, a
        layer takes too long for a whole window."""
        projections = [layer.encoder_attn.k_proj for layer in self._decoder.layers]
        if self.device.type != "cpu":
            return projections
        encoder = self.model.model.encoder
        return projections + [part for part in encoder.modules() if isinstance(part, Linear)]

    def add_row(self, encoded: Encoded, window: int) -> int:
        """Store one of the encoded windows in a new row, and return the row."""
        row = self.rows
        for index, made in enumerate(encoded):
            for cache, states in zip(self._cross, made, strict=True):
                cache[index, row] = states[window]
        self.rows += 1
        return row

    def free(self, row: int) -> int:
        """Free a row. Return the row whose content moves there: the last one."""
        last = self.rows - 1
        if row != last:
            for cache in (*self._own, *self._cross):
                cache[:, row] = cache[:, last]
        self.rows = last
        return last

    def prefill(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Run a window's first tokens. Return the scores after each of them
        ``(tokens, vocabulary)``, float32."""
        ids = torch.tensor([list(tokens)], device=self.device)
        places = torch.arange(len(tokens), device=self.device)[None]
        hidden, _ = self._decode(slice(row, row + 1), ids, places, len(tokens))
        return self._scores(hidden[0])

    def advance(self, tokens: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """Run one token of every row in use, at its place. Return the scores of the next ones
        ``(rows, vocabulary)``, float32."""
        ids = torch.tensor(tokens, device=self.device)[:, None]
        at = torch.tensor(places, device=self.device)[:, None]
        hidden, _ = self._decode(slice(0, self.rows), ids, at, max(places) + 1)
        return self._scores(hidden[:, 0])

    def attend(
        self, row: int, tokens: Sequence[int], heads: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the cross-attention of some heads for a window's tokens
        ``(heads, tokens, positions)``, float32, cpu."""
        ids = torch.tensor([list(tokens)], device=self.device)
        places = torch.arange(len(tokens), device=self.device)[None]
        _, queries = self._decode(slice(row, row + 1), ids, places, len(tokens))
        found = []
        for layer, head in heads:
            keys = self._cross[0][layer, row, head]
            found.append((queries[layer][0, head] @ keys.T).float().softmax(-1))
        return torch.stack(found).cpu()

    def _decode(
        self, rows: slice, ids: torch.Tensor, places: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run tokens ``(rows, tokens)`` at their places, which are stored in the caches. Return
        their hidden states, and the queries of each layer's cross-attention."""
        decoder = self._decoder
        hidden = decoder.embed_tokens(ids) + decoder.embed_positions.weight[places]
        mask = torch.arange(longest, device=self.device) <= places[:, None, :, None]
        which = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        crossings = []
        for index, layer in enumerate(decoder.layers):
            own, cross = layer.self_attn, layer.encoder_attn
            states = layer.self_attn_layer_norm(hidden)
            queries = self._split(own.q_proj(states) * own.scaling)
            for cache, made in zip(
                self._own, (own.k_proj(states), own.v_proj(states)), strict=True
            ):
                split = made.view(*made.shape[:2], self._heads, self._head_size)
                cache[index][which, :, places] = split
            keys, values = (cache[index, rows, :, :longest] for cache in self._own)
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, scale=1.0)
            hidden = hidden + own.out_proj(self._join(mixed))
            states = layer.encoder_attn_layer_norm(hidden)
            queries = self._split(cross.q_proj(states) * cross.scaling)
            keys, values = (cache[index, rows] for cache in self._cross)
            mixed = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
            hidden = hidden + cross.out_proj(self._join(mixed))
            crossings.append(queries)
            states = layer.final_layer_norm(hidden)
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(states)))
        return decoder.layer_norm(hidden), crossings

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model.proj_out(hidden).float()
        return scores

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], self._heads, self._head_size).transpose(1, 2)

    @staticmethod
    def _join(mixed: torch.Tensor) -> torch.Tensor:
        return mixed.transpose(1, 2).flatten(2)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
