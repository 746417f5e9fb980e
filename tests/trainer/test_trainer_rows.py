"""How samples become rows: what is shared, what is scored, what is padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canter.trainer.micro_batch import pad
from canter.trainer.prefix import common_prefix, shared_rows, tree_mask
from canter.trainer.rows import Row, micro_batches, plain_row
from canter.types import Sample, as_ids
from tiny_policy import make_group, make_sample

WIDTH = 576


def described(row: Row) -> tuple[list[int], list[int], list[int]]:
    return row.ids.tolist(), row.positions.tolist(), row.branches.tolist()


def short(ids: list[int], trained: list[int], group: str = "g", index: int = 0) -> Sample:
    mask = np.isin(np.arange(len(ids)), trained)
    zeros = np.zeros(len(ids), np.float32)
    return Sample(f"{group}{index}", group, 0, as_ids(ids), mask, zeros, np.where(mask, 0, -1).astype(np.int32))


def test_a_group_is_one_row_with_its_prompt_once() -> None:
    samples = [short([1, 2, 3, 7, 8], [3, 4]), short([1, 2, 3, 5, 9], [3, 4], index=1)]
    (row,) = shared_rows(samples, width=WIDTH, token_budget=100)
    assert described(row) == ([1, 2, 3, 5, 7], [0, 1, 2, 3, 3], [0, 0, 0, 1, 2])  # the last tokens predict nothing
    assert [(s.sample, s.tokens.tolist(), s.at.tolist()) for s in row.scored] == [
        (1, [3, 4], [2, 3]),
        (0, [3, 4], [2, 4]),
    ]


def test_trained_tokens_may_lie_in_the_shared_part() -> None:
    samples = [short([1, 2, 3, 4, 5], [2, 4]), short([1, 2, 3, 4, 6], [4], index=1), short([1, 2, 3], [2], index=2)]
    (row,) = shared_rows(samples, width=WIDTH, token_budget=100)
    assert row.ids.tolist() == [1, 2, 3, 4, 3, 4]  # the shortest ends the shared part
    assert row.branches.tolist() == [0, 0, 2, 2, 3, 3]
    assert {s.sample: s.at.tolist() for s in row.scored} == {2: [1], 0: [1, 3], 1: [5]}


def test_strangers_do_not_share() -> None:
    samples = [short([1, 2, 3], [2]), short([4, 2, 3], [2], index=1), short([1, 2, 3], [2], group="h")]
    assert [row.ids.tolist() for row in shared_rows(samples, width=WIDTH, token_budget=100)] == [[1, 2], [4, 2], [1, 2]]


def test_a_row_keeps_to_the_token_budget() -> None:
    samples = make_group(0, size=16, prompt=40, reply=8)
    rows = shared_rows(samples, width=WIDTH, token_budget=64)
    assert 1 < len(rows) < 16
    assert max(map(len, rows)) <= 64


def test_long_replies_behind_a_short_prompt_do_not_share() -> None:
    random = np.random.default_rng(0)
    samples = [make_sample(random, [1, 2, 3, 4], [(3000, 0)], index=index) for index in range(4)]
    assert all(row.plain for row in shared_rows(samples, width=64, token_budget=10**6))


def test_samples_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        plain_row([short([1, 2], [0])], 0)
    with pytest.raises(ValueError, match="sample 0 of g0: nothing in it is trained"):
        plain_row([short([1, 2], [])], 0)


def test_the_mask_lets_a_token_see_the_prefix_and_its_own_branch() -> None:
    mask = tree_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_common_prefix() -> None:
    assert common_prefix(as_ids([1, 2, 3]), as_ids([1, 2, 4])) == 2
    assert common_prefix(as_ids([1, 2]), as_ids([1, 2, 4])) == 2
    assert common_prefix(as_ids([]), as_ids([1])) == 0


@given(seed=st.integers(0, 999), budget=st.integers(1, 400), share=st.booleans())
def test_every_trained_token_is_scored_once_within_the_budget(seed: int, budget: int, share: bool) -> None:
    samples = [
        *make_group(seed, size=5, prompt=30, reply=9),
        *make_group(seed + 1, size=3, prompt=3, reply=9, group="h"),
    ]
    plain = [plain_row(samples, index) for index in range(len(samples))]
    rows = shared_rows(samples, width=16, token_budget=budget) if share else plain
    batches = micro_batches(rows, budget)
    scored = [(s.sample, int(t)) for batch in batches for row in batch for s in row.scored for t in s.tokens]
    assert sorted(scored) == [(i, int(t)) for i, sample in enumerate(samples) for t in np.flatnonzero(sample.mask)]
    for batch in batches:
        slots = len(batch) * max(map(len, batch))
        assert slots <= budget or len(batch) == 1
        assert sum(map(len, batch)) >= 0.8 * slots
        ids, _, branches = pad(batch, torch.device("cpu"))
        assert (branches is None) == all(row.plain for row in batch)
        for b, row in enumerate(batch):
            for part in row.scored:  # what predicts a token stands where the token before it does
                before = samples[part.sample].ids[part.tokens - 1].tolist()
                assert ids[b, torch.from_numpy(part.at)].tolist() == before
                assert row.positions[part.at].tolist() == (part.tokens - 1).tolist()
