"""How samples are laid out for the model: rows of tokens, and micro-batches of rows.

A row is a shared prefix and the branches behind it: a token sees the prefix, and what comes before it in its own
branch. A plain row has one branch and no prefix. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canter.types import Ids, Sample

Index = NDArray[np.int64]

PREFIX = 0
"""Branch number of a row's shared prefix; branches count from 1."""

FULL_ENOUGH = 0.8
"""Share of a micro-batch's slots that must hold tokens, not padding, for another row to join it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of one sample whose logprobs a row gives.

    sample  which one, in the sequence that was laid out
    tokens  their places in the sample's arrays [n]
    at      the places in the row that predict them [n]
    """

    sample: int
    tokens: Index
    at: Index


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the model's input: token ids, position and branch of each [T], and what it scores."""

    ids: Ids
    positions: Index
    branches: Index
    scored: tuple[Scored, ...]

    @property
    def plain(self) -> bool:
        return len(self.scored) == 1

    def __len__(self) -> int:
        return len(self.ids)


def places(sample: Sample) -> Index:
    """Where the sample is scored: its trained tokens, of which there is at least one. The first token of a sequence has
    nothing that predicts it."""
    found = np.flatnonzero(sample.mask)
    if not len(found) or found[0] == 0:
        what = "its first token cannot be trained" if len(found) else "nothing in it is trained"
        raise ValueError(f"sample {sample.chain} of {sample.rollout_id}: {what}")
    return found


def plain_row(samples: Sequence[Sample], index: int) -> Row:
    """The sample up to its last scored token; that one and what follows predict nothing that is asked for."""
    tokens = places(samples[index])
    length = int(tokens[-1])
    return Row(
        ids=samples[index].ids[:length],
        positions=np.arange(length),
        branches=np.ones(length, np.int64),
        scored=(Scored(index, tokens, tokens - 1),),
    )


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[Row]]:
    """Rows of similar length together, at most `token_budget` slots (rows × longest) in each; a longer row goes alone.

    Depends on the rows and their order alone. Plain and branched rows do not mix: plain ones need no mask.
    """
    batches: list[list[Row]] = []
    for plain in (True, False):
        batch: list[Row] = []
        for row in sorted((row for row in rows if row.plain is plain), key=len):
            slots = (len(batch) + 1) * len(row)
            if batch and (slots > token_budget or sum(map(len, batch)) + len(row) < FULL_ENOUGH * slots):
                batches.append(batch)
                batch = []
            batch.append(row)
        batches += [batch] if batch else []
    return batches
