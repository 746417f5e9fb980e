"""Prefix sharing: samples that begin alike are forwarded as one row, their common tokens once.

The rollouts of a group start from the same prompt. Behind it, each completion is a branch: it sees the prompt and
itself, and its positions go on from the prompt's end. Hidden states are the same as in a row of its own, so loss and
gradient are those of plain rows, whatever lies in the shared part; only the work is less.

The mask of such a row is dense, so attention costs twice that of a plain causal row of its length; `shared_rows` shares
only where the whole is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from canter.trainer.rows import PREFIX, Row, Scored, places, plain_row
from canter.types import Ids, Sample


def shared_rows(samples: Sequence[Sample], *, width: int, token_budget: int) -> list[Row]:
    """Rows that together score every trained token of the samples once.

    Samples of one group are put in lexicographic order, so that those with a common beginning stand together, and
    each joins the row before it where that is cheaper than a row of its own. `width` is the model's hidden size, by
    which work on tokens is weighed against attention.
    """
    rows: list[Row] = []
    for group in _groups(samples):
        members: list[int] = []
        for index in group:
            joined = [*members, index]
            if members and not _pays(samples, members, index, width, token_budget):
                rows.append(_row(samples, members))
                joined = [index]
            members = joined
        rows.append(_row(samples, members))
    return rows


def tree_mask(branches_BT: Tensor) -> Tensor:
    """bool[B, 1, T, T], true where a query (third axis) may attend to a key (last axis): not later in the row, and in
    the shared prefix or in its own branch. Padding (branch -1) sees padding, so that no row of the mask is empty."""
    length = branches_BT.shape[1]
    order = torch.arange(length, device=branches_BT.device)
    causal = order[:, None] >= order[None, :]
    query, key = branches_BT[:, :, None], branches_BT[:, None, :]
    return (causal & ((key == PREFIX) | (query == key)))[:, None]


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of tokens that both begin with."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def _groups(samples: Sequence[Sample]) -> Iterator[list[int]]:
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    for group in groups.values():
        yield sorted(group, key=lambda index: (samples[index].ids.astype(">u4").tobytes(), index))


def _needed(sample: Sample) -> Ids:
    """The tokens that must be forwarded to score the trained ones."""
    return sample.ids[: int(places(sample)[-1])]


def _pays(samples: Sequence[Sample], members: Sequence[int], index: int, width: int, token_budget: int) -> bool:
    alone = len(_needed(samples[index]))
    before, after = _shared_length(samples, members), _shared_length(samples, [*members, index])
    now = _cost(before, width, dense=len(members) > 1) + _cost(alone, width, dense=False)
    return after <= token_budget and _cost(after, width, dense=True) < now


def _cost(length: int, width: int, *, dense: bool) -> float:
    """Work on a row, in units of 4·width multiplications per layer: 24·width² per token in the matrices of a layer, and
    attention 4·width·length per token, half of it where a causal kernel skips the future."""
    return length * (6 * width + (length if dense else length / 2))


def _prefix(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """The tokens that all members begin with; in lexicographic order, the first and the last differ soonest."""
    if len(members) == 1:
        return 0
    shortest = min(len(_needed(samples[index])) for index in members)
    return min(shortest, common_prefix(samples[members[0]].ids, samples[members[-1]].ids))


def _shared_length(samples: Sequence[Sample], members: Sequence[int]) -> int:
    prefix = _prefix(samples, members)
    return prefix + sum(len(_needed(samples[index])) - prefix for index in members)


def _row(samples: Sequence[Sample], members: Sequence[int]) -> Row:
    if len(members) == 1:
        return plain_row(samples, members[0])
    prefix = _prefix(samples, members)
    bodies = [_needed(samples[index])[prefix:] for index in members]
    starts = prefix + np.cumsum([0, *map(len, bodies)])[:-1]
    scored = []
    for index, start in zip(members, starts, strict=True):
        tokens = places(samples[index])
        before = tokens - 1
        scored.append(Scored(index, tokens, np.where(before < prefix, before, before - prefix + start)))
    return Row(
        ids=np.concatenate([samples[members[0]].ids[:prefix], *bodies]),
        positions=np.concatenate([np.arange(prefix), *(prefix + np.arange(len(body)) for body in bodies)]),
        branches=np.repeat(np.arange(len(bodies) + 1), [prefix, *map(len, bodies)]),
        scored=tuple(scored),
    )
