"""The pictures of a prompt: which tokens are theirs, at which positions, and how blocks tell them
apart.

A chat template writes one token for a picture; the prompt has as many as the vision tower makes of
it. They have positions on three axes, time, height and width, and the text behind a picture
continues after the largest of these. So a position is smaller than the token's index by a shift
that grows with each picture.

Nothing but its picture tells one picture's tokens from those of another. For the prefix cache they
therefore have keys made of the picture's digest, negative like no token's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.engines.interrupting import Interruptible


@dataclass(slots=True, eq=False)
class Encoding:
    """A picture whose encoding has begun. ``parts``: how much of the tower has been computed."""

    computation: Interruptible
    parts: int = 0


@dataclass(slots=True, eq=False)
class Picture:
    """Patches ``(patches, values)`` of a picture on the CPU, in the order of the tower."""

    patches: torch.Tensor
    rows: int
    """Height in tokens."""
    columns: int
    digest: bytes
    """128 bits of a hash of the patches and their arrangement."""
    features: torch.Tensor | None = None
    """What the language model reads, ``(tokens, size)`` on its device, while it is needed."""
    encoding: Encoding | None = None
    """Their computation, while it is interrupted."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class PictureInput:
    """Part of a prompt with pictures, as a forward needs it."""

    positions: torch.Tensor
    """``(3, tokens)``, int64, on the CPU."""
    places: Sequence[int] = ()
    """Indices of the tokens that belong to pictures."""
    features: Sequence[torch.Tensor] = ()
    """Their embeddings, ``(places, size)`` together."""


class PicturePrompt:
    """A prompt with pictures. ``ids`` has the token ``mark`` once for each.

    Raise ``ValueError`` if there are more or fewer.
    """

    def __init__(self, ids: Sequence[int], pictures: Sequence[Picture], mark: int) -> None:
        if ids.count(mark) != len(pictures):
            raise ValueError(
                f"its chat template wrote {ids.count(mark)} of its {len(pictures)} pictures"
            )
        self.ids: list[int] = []
        self.keys: list[int] = []
        """A number for each token by which the prefix cache tells prompts apart."""
        self._spans: list[tuple[int, Picture]] = []
        parts: list[torch.Tensor] = []
        waiting, position = iter(pictures), 0
        for id in ids:
            if id != mark:
                self.ids.append(id)
                self.keys.append(id)
                parts.append(torch.full((3, 1), position))
                position += 1
                continue
            picture = next(waiting)
            self._spans.append((len(self.ids), picture))
            self.ids += [mark] * picture.tokens
            first, second = _words(picture.digest)
            # The token before a picture is the template's; its own key would say nothing.
            self.keys[-1:] = [first] * len(self.keys[-1:])
            self.keys += [second] * picture.tokens
            parts.append(_places(picture) + position)
            position += max(picture.rows, picture.columns)
        self._positions = torch.cat(parts, dim=1)
        self.shift = position - len(self.ids)
        """Position of a token behind the prompt, less its index."""

    def pictures_in(self, start: int, stop: int) -> Iterator[Picture]:
        """Yield the pictures with a token from ``start`` up to ``stop``."""
        for begin, picture in self._spans:
            if begin < stop and begin + picture.tokens > start:
                yield picture

    def part(self, start: int, stop: int) -> PictureInput:
        """Return tokens ``[start, stop)``; their pictures have features."""
        places: list[int] = []
        features: list[torch.Tensor] = []
        for begin, picture in self._spans:
            first, last = max(begin, start), min(begin + picture.tokens, stop)
            if first < last:
                assert picture.features is not None
                places += range(first - start, last - start)
                features.append(picture.features[first - begin : last - begin])
        return PictureInput(self._positions[:, start:stop], places, features)

    def forget(self) -> None:
        """Drop the features, and abandon their computation; they are made again if the prompt must
        be."""
        for _, picture in self._spans:
            picture.features = None
            if picture.encoding is not None:
                with torch.inference_mode(False):
                    picture.encoding.computation.abandon()
                picture.encoding = None


def _words(digest: bytes) -> tuple[int, int]:
    """Return two halves of a digest as negative numbers of 64 bits."""
    first, second = (int.from_bytes(half) >> 1 for half in (digest[:8], digest[8:16]))
    return -1 - first, -1 - second


def _places(picture: Picture) -> torch.Tensor:
    """Return the positions ``(3, tokens)`` in a picture, row by row: no time, height and width."""
    height = torch.arange(picture.rows).repeat_interleave(picture.columns)
    width = torch.arange(picture.columns).repeat(picture.rows)
    return torch.stack([torch.zeros_like(height), height, width])
