"""Continuous batching: generations join and leave a running batch between steps. Blocking, for one thread.

Every token is drawn in one place: a step feeds the last known token of each row (at first the last one of its prompt)
and draws the next. What comes before that token is *filled*: computed in chunks that start at multiples of `chunk`,
each stored for other prompts that begin the same way. The rollouts of a group thus compute their prompt once, and a
conversation's next turn computes only what is new.

A new policy version invalidates all keys and values. Those of generations in progress are filled again under the new
weights, so each token's logprob is that of its own version's forward pass over the whole sequence before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.engine.draw import Drawn, Turn, draw
from canter.engine.kv import GRAIN, ChunkStore, Rows, Shape, chunk_keys
from canter.engine.spans import to_spans
from canter.errors import EngineError
from canter.types import FinishReason, Generation, Sampling, as_ids

FILL_TOKENS = 1024
"""Tokens filled between two steps, so that a long prompt does not hold up those that are decoding."""

STORE_SHARE = 0.25
"""Share of the key-value slots that is for stored chunks of prompts."""

STOP_MARGIN = 4
"""Tokens decoded before the furthest one that a stop string can reach."""

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens included; for stop strings."""


@dataclass(slots=True, eq=False)
class Row:
    """One generation: what was asked for and what there is. Prompt and reply together never exceed `limit` tokens."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    limit: int
    stop_ids: frozenset[int]
    salt: str = ""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: EngineError | None = None

    @property
    def last(self) -> int:
        """Position of the last token."""
        return len(self.prompt) + len(self.sampled) - 1

    @property
    def last_token(self) -> int:
        return self.sampled[-1] if self.sampled else self.prompt[-1]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.sampled]

    def turn(self) -> Turn:
        return Turn(self.sampling, self.seed, len(self.sampled))

    def add(self, drawn: Drawn, version: int) -> None:
        self.sampled.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        self.versions.append(version)

    def generation(self) -> Generation:
        """What there is; without a finish reason it counts as aborted."""
        logprobs = np.asarray(self.logprobs, np.float32)
        return Generation(as_ids(self.sampled), logprobs, self.finish or FinishReason.ABORT, to_spans(self.versions))


@dataclass(slots=True)
class _Filling:
    """A row on its way into the batch: `ids` are all its tokens but the last; the first `done` of them are filled."""

    row: Row
    ids: list[int]
    keys: list[bytes]
    done: int = 0


class Batcher:
    """Holds the rows that are decoded together, the one that is being filled, and those that wait.

    `rows[i]` has its keys and values in row i + 1 of `_kv`; row 0 is where prompts are filled. A step computes at least
    `min_rows` rows, because matrix products of fewer may round differently.
    """

    def __init__(
        self,
        model: Any,
        decode: Decode,
        *,
        max_batch: int,
        cache_tokens: int,
        chunk: int = 64,
        min_rows: int = 1,
        version: int = 0,
    ) -> None:
        self.version = version
        self.rows: list[Row] = []
        self.waiting: deque[Row] = deque()
        self._returning: deque[Row] = deque()
        self._filling: _Filling | None = None
        self._model = model
        self._decode = decode
        self._chunk = chunk
        self._max_batch = max(max_batch, min_rows)
        self._min_rows = min_rows
        self._kv = Rows(Shape.of(model.config), dtype=model.dtype, device=model.device)
        stored = int(cache_tokens * STORE_SHARE)
        self._store = ChunkStore(stored)
        self._slots = cache_tokens - stored

    @property
    def longest(self) -> int:
        """The most tokens that a row may have: row 0 and `min_rows` of them must fit."""
        return self._slots // (1 + self._min_rows) // GRAIN * GRAIN

    @property
    def started(self) -> list[Row]:
        """All rows that do not wait."""
        filling = self._filling  # read once: the engine's health is asked for from another thread
        return [*self.rows, *([filling.row] if filling else []), *self._returning]

    def clear(self) -> None:
        """Forgets all rows, and what was computed."""
        self.waiting.clear()
        self.change_version(self.version)
        self._returning.clear()

    def submit(self, row: Row) -> None:
        """Queues a row. Its `limit` is at most `longest`, its prompt shorter than that and not empty."""
        self.waiting.append(row)

    def remove(self, row: Row) -> None:
        """Takes out a row, wherever it is."""
        if self._filling and row is self._filling.row:
            self._filling = None
        elif row in self.rows:
            self._leave(row)
        elif row in self._returning:
            self._returning.remove(row)
        else:
            self.waiting.remove(row)

    def change_version(self, version: int) -> None:
        """The model's weights have changed: what was computed under the old ones is forgotten."""
        self.version = version
        self._returning = deque(self.started)
        self._filling = None
        self.rows = []
        self._store.clear()

    @torch.no_grad()
    def step(self, *, admit: bool = True) -> list[Row]:
        """Fills what joins, draws one token for each row, and returns the rows that are done; they have left. Without
        `admit` no waiting row starts."""
        self._fill(admit=admit)
        if not self.rows:
            return []
        logits_BV = self._forward(self.rows)
        for row, drawn in zip(self.rows, draw(logits_BV, [row.turn() for row in self.rows]), strict=True):
            if math.isnan(drawn.logprob):
                row.error = EngineError(
                    f"the model's logits are not finite after {row.last + 1} tokens under policy version "
                    f"{self.version}; check the last update's loss and gradient norm"
                )
            else:
                row.add(drawn, self.version)
                row.finish = self._finish(row)
        done = [row for row in self.rows if row.finish or row.error]
        for row in done:
            self._leave(row)
        return done

    def _fill(self, *, admit: bool) -> None:
        budget = FILL_TOKENS
        while budget > 0:
            if self._filling is None:
                row = self._next(admit=admit)
                if row is None:
                    return
                ids = row.ids[:-1]
                self._filling = _Filling(row, ids, chunk_keys(ids, self._chunk, row.salt))
                self._make_room()
            if self._filling.done < len(self._filling.ids):
                budget -= self._fill_chunk(self._filling)
            else:
                self._join(self._filling.row)
                self._filling = None

    def _next(self, *, admit: bool) -> Row | None:
        """The next row to fill: first those that had started, then in order of arrival, if there is room."""
        if self._returning:
            return self._returning.popleft()
        if not (admit and self.waiting and len(self.rows) < self._max_batch):
            return None
        widest = max(row.limit for row in [self.waiting[0], *self.rows])
        fits = (1 + max(len(self.rows) + 1, self._min_rows)) * _ceil(widest, GRAIN) <= self._slots
        return self.waiting.popleft() if fits else None

    def _fill_chunk(self, filling: _Filling) -> int:
        """Fills one chunk of row 0. Returns the number of tokens that had to be computed."""
        start = filling.done
        end = filling.done = min(start + self._chunk, len(filling.ids))
        key = filling.keys[start // self._chunk]
        stored = self._store.get(key)
        if stored is not None:
            self._kv.write(0, start, stored)
            return 0
        device = self._model.device
        positions_T = torch.arange(start, end, device=device)
        mask_TS = torch.arange(end, device=device) <= positions_T[:, None]
        self._model(
            input_ids=torch.tensor([filling.ids[start:end]], device=device),
            position_ids=positions_T[None],
            attention_mask=mask_TS[None, None],
            cache=self._kv.span(0, start, end),
            use_cache=True,
            logits_to_keep=1,
        )
        self._store.put(key, self._kv.read(0, start, end))
        return end - start

    def _join(self, row: Row) -> None:
        self.rows.append(row)
        self._kv.move(0, len(self.rows), row.last)

    def _leave(self, row: Row) -> None:
        """Rows stay packed: the last one takes the place of the one that leaves."""
        index, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self._kv.move(len(self.rows) + 1, index + 1, last.last)
            self.rows[index] = last

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """float32 logits [B, V] after the last token of each row."""
        device = self._model.device
        padding = [0] * (self._min_rows - len(rows))
        width = _ceil(max(row.last for row in rows) + 1, GRAIN)
        self._make_room()
        tokens_B = torch.tensor([row.last_token for row in rows] + padding, device=device)
        positions_B = torch.tensor([row.last for row in rows] + padding, device=device)
        mask_BS = torch.arange(width, device=device) <= positions_B[:, None]
        output = self._model(
            input_ids=tokens_B[:, None],
            position_ids=positions_B[:, None],
            attention_mask=mask_BS[:, None, None],
            cache=self._kv.column(1, positions_B, width),
            use_cache=True,
        )
        logits_BV: Tensor = output.logits[: len(rows), -1].float()
        return logits_BV

    def _make_room(self) -> None:
        """Sees to it that all started rows have their keys and values. Grows by more than they need, so that it happens
        seldom, within the slots that `_next` counted on."""
        held = [*self.rows, *([self._filling.row] if self._filling else [])]
        rows = 1 + max(len(held), self._min_rows)
        positions = _ceil(max(row.last for row in held) + 1, GRAIN)
        if rows <= self._kv.rows and positions <= self._kv.positions:
            return
        spare_rows = min(2 ** (rows - 1).bit_length() + 1, self._max_batch + 1)
        spare_positions = _ceil(positions * 5 // 4, GRAIN)
        if spare_rows * spare_positions <= self._slots:
            rows, positions = max(rows, spare_rows), spare_positions
        self._kv.resize(rows, positions)

    def _finish(self, row: Row) -> FinishReason | None:
        if row.sampled[-1] in row.stop_ids or self._ends_with_stop(row):
            return FinishReason.STOP
        return FinishReason.LENGTH if row.last + 1 >= row.limit else None

    def _ends_with_stop(self, row: Row) -> bool:
        """Whether the last token completed a stop string. Only a tail is decoded: a string of n bytes cannot reach
        further back than n tokens, and the margin keeps what decoders do to the first token away from it."""
        if not row.sampling.stop:
            return False
        reach = max(len(stop.encode()) for stop in row.sampling.stop) + STOP_MARGIN
        text = self._decode(row.sampled[-reach:])
        return any(stop in text for stop in row.sampling.stop)


def _ceil(value: int, grain: int) -> int:
    return -(-value // grain) * grain
