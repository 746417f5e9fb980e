"""Keys and values: the rows that are decoded together, and finished chunks of prompts for others to start from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GRAIN = 64
"""Positions come in multiples of this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's cache: layers, key-value heads, size of a head."""

    layers: int
    heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers text configuration."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


class Rows:
    """Keys and values of sequences, one a row: a tensor [layers, 2, rows, heads, positions, head_dim] that grows on
    demand. Token p of a sequence is at position p of its row; what is beyond a sequence's end is finite and masked."""

    def __init__(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._data = self._zeros(0, 0)

    @property
    def rows(self) -> int:
        return self._data.shape[2]

    @property
    def positions(self) -> int:
        return self._data.shape[4]

    def resize(self, rows: int, positions: int) -> None:
        """Makes room for this many rows of this many positions, keeping what fits."""
        old, self._data = self._data, self._zeros(rows, positions)
        rows, positions = min(rows, old.shape[2]), min(positions, old.shape[4])
        self._data[:, :, :rows, :, :positions] = old[:, :, :rows, :, :positions]

    def move(self, source: int, target: int, length: int) -> None:
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of positions `[start, end)`: [layers, 2, heads, end - start, head_dim]."""
        return self._data[:, :, row, :, start:end].clone()

    def write(self, row: int, start: int, chunk: Tensor) -> None:
        self._data[:, :, row, :, start : start + chunk.shape[3]] = chunk

    def span(self, row: int, start: int, end: int) -> Span:
        """The cache of a forward pass over positions `[start, end)` of one row."""
        return Span(self._data[:, :, row : row + 1, :, :end], start)

    def column(self, first: int, positions_B: Tensor, width: int) -> Column:
        """The cache of a forward pass over one token of each row from `first` on, at these positions, all below
        `width`."""
        return Column(self._data[:, :, first : first + len(positions_B), :, :width], positions_B)

    def _zeros(self, rows: int, positions: int) -> Tensor:
        s = self._shape
        # zeros and not empty: a masked position has weight 0, and 0 * NaN would be NaN
        size = (s.layers, 2, rows, s.heads, positions, s.head_dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


class Span:
    """What transformers' attention layers take as their `cache`: writes the new keys and values, returns all."""

    def __init__(self, data: Tensor, start: int) -> None:
        self._data = data
        self._start = start

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`keys` and `values` are [1, heads, tokens, head_dim]."""
        all_keys, all_values = self._data[layer]
        all_keys[:, :, self._start :] = keys
        all_values[:, :, self._start :] = values
        return all_keys, all_values


class Column:
    """Like `Span`, for one token of each row at a position of its own."""

    def __init__(self, data: Tensor, positions_B: Tensor) -> None:
        self._data = data
        self._positions_B = positions_B
        self._rows_B = torch.arange(len(positions_B), device=positions_B.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`keys` and `values` are [B, heads, 1, head_dim]."""
        all_keys, all_values = self._data[layer]
        all_keys[self._rows_B, :, self._positions_B] = keys[:, :, 0]
        all_values[self._rows_B, :, self._positions_B] = values[:, :, 0]
        return all_keys, all_values


def chunk_keys(ids: Sequence[int], chunk: int, salt: str) -> list[bytes]:
    """A key for each chunk of `ids`, the last one perhaps shorter: a hash of the salt and all tokens up to its end."""
    named = salt.encode()
    digest = hashlib.blake2b(len(named).to_bytes(8, "little") + named, digest_size=16)
    keys: list[bytes] = []
    data = np.asarray(ids, "<i4").tobytes()
    for start in range(0, len(data), 4 * chunk):
        digest.update(data[start : start + 4 * chunk])
        keys.append(digest.copy().digest())
    return keys


class ChunkStore:
    """Keys and values of prompt chunks of one policy version, by `chunk_keys`; the longest unused are dropped first.

    A key says all that its chunk was computed from, so whoever finds one gets bit for bit what it would have computed.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._tokens = 0
        self._chunks: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, key: bytes) -> Tensor | None:
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
        return chunk

    def put(self, key: bytes, chunk: Tensor) -> None:
        """`chunk` is [layers, 2, heads, tokens, head_dim]; its key is not there yet."""
        self._chunks[key] = chunk
        self._tokens += chunk.shape[3]
        while self._tokens > self._capacity:
            _, dropped = self._chunks.popitem(last=False)
            self._tokens -= dropped.shape[3]

    def clear(self) -> None:
        self._chunks.clear()
        self._tokens = 0
