import numpy as np
import pytest
import torch
from engine_model import EOS, dense_logprobs, letters, make_prompt, small_llama

from canter.engine.batcher import Batcher, Row
from canter.types import FinishReason, Sampling, VersionSpan

EXACT = 5e-5
"""Rounding of float32 with the large weights of the tiny model."""


def make_row(name: str, prompt, *, tokens: int = 8, limit: int | None = None, **sampling) -> Row:
    wanted = Sampling(max_tokens=tokens, **sampling)
    return Row(
        request_id=name,
        prompt=list(map(int, prompt)),
        sampling=wanted,
        seed=wanted.seed or 0,
        limit=limit or len(prompt) + tokens,
        stop_ids=frozenset([EOS, *wanted.stop_token_ids]),
    )


def make_batcher(model=None, **options) -> Batcher:
    options = {"max_batch": 8, "cache_tokens": 8192, "chunk": 16, **options}
    return Batcher(model or small_llama(), letters, **options)


def run(batcher: Batcher, rows: list[Row]) -> list[Row]:
    """Submits rows and steps until all are done; returns them in the order in which they ended."""
    for row in rows:
        batcher.submit(row)
    done: list[Row] = []
    while batcher.started or batcher.waiting:
        done += batcher.step()
    return done


class CountingModel:
    """Counts the tokens that a model computes in fills (rows of more than one token) and its forward passes."""

    def __init__(self, model) -> None:
        self._model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.filled = 0

    def __call__(self, *, input_ids, cache, **kwargs):
        if kwargs.get("logits_to_keep"):
            self.filled += input_ids.shape[1]
        return self._model(input_ids=input_ids, cache=cache, **kwargs)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40, 130])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_dense_forward_pass(length, temperature):
    model = small_llama()
    rows = [make_row(str(i), make_prompt(i, length + i), tokens=70, seed=i, temperature=temperature) for i in range(6)]
    run(make_batcher(model), rows)
    for row in rows:
        expected = dense_logprobs(model, row.prompt, row.sampled, row.sampling)
        np.testing.assert_allclose(row.logprobs, expected, atol=EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_a_reply_does_not_depend_on_what_else_runs_or_when(seed):
    model = small_llama()

    def make_rows() -> list[Row]:
        # three prompts, two of which begin alike
        prompts = [make_prompt(1, 40), np.concatenate([make_prompt(1, 40)[:35], make_prompt(2, 9)]), make_prompt(3, 5)]
        return [make_row(str(i), prompts[i % 3], tokens=3 + i, seed=i // 3, temperature=0.9) for i in range(12)]

    alone = [run(make_batcher(model, min_rows=4), [row])[0] for row in make_rows()]
    batcher = make_batcher(model, min_rows=4, max_batch=5)
    together = make_rows()
    random = np.random.default_rng(seed)
    for index in random.permutation(len(together)):
        batcher.submit(together[index])
        for _ in range(random.integers(0, 4)):
            batcher.step()
    run(batcher, [])
    assert [row.sampled for row in together] == [row.sampled for row in alone]
    for row, same in zip(together, alone, strict=True):
        np.testing.assert_allclose(row.logprobs, same.logprobs, atol=EXACT)


def test_a_common_prompt_is_filled_once():
    model = CountingModel(small_llama())
    batcher = make_batcher(model)
    prompt = make_prompt(0, 50)
    run(batcher, [make_row(str(i), prompt, seed=i) for i in range(20)])
    assert model.filled == 49
    run(batcher, [make_row("next", [*prompt, *make_prompt(1, 10)])])
    assert model.filled == 49 + (59 - 48)  # whole chunks of 16 are shared


def test_salts_do_not_share():
    model = CountingModel(small_llama())
    rows = [make_row(str(i), make_prompt(0, 50)) for i in range(2)]
    rows[1].salt = "other"
    run(make_batcher(model), rows)
    assert model.filled == 98


def test_a_new_version_leaves_nothing_stale():
    model, changed = small_llama(0), small_llama(1)
    batcher = make_batcher(model)
    prompt = make_prompt(0, 40)
    run(batcher, [make_row("before", prompt, seed=1)])
    model.load_state_dict(changed.state_dict())
    batcher.change_version(1)
    (after,) = run(batcher, [make_row("after", prompt, seed=1)])
    np.testing.assert_allclose(
        after.logprobs, dense_logprobs(changed, prompt, after.sampled, after.sampling), atol=EXACT
    )
    assert after.generation().versions == (VersionSpan(1, 0, len(after.sampled)),)


def test_a_new_version_in_mid_generation_continues_exactly():
    model, old, new = small_llama(0), small_llama(0), small_llama(1)
    batcher = make_batcher(model, max_batch=3)
    rows = [make_row(str(i), make_prompt(i % 2, 20), tokens=12, seed=i) for i in range(5)]
    for row in rows:
        row.stop_ids = frozenset()
        batcher.submit(row)
    for _ in range(4):
        batcher.step()
    model.load_state_dict(new.state_dict())
    batcher.change_version(1)
    run(batcher, [])
    for row in rows:
        under_old = dense_logprobs(old, row.prompt, row.sampled, row.sampling)
        under_new = dense_logprobs(new, row.prompt, row.sampled, row.sampling)
        np.testing.assert_allclose(
            row.logprobs, np.where(np.array(row.versions) == 0, under_old, under_new), atol=EXACT
        )
    assert [row.generation().versions for row in rows[:3]] == [(VersionSpan(0, 0, 4), VersionSpan(1, 4, 12))] * 3
    assert [row.generation().versions for row in rows[3:]] == [(VersionSpan(1, 0, 12),)] * 2


def test_why_a_reply_ends():
    model = small_llama()
    (free,) = run(make_batcher(model), [make_row("free", make_prompt(0, 9), tokens=30, seed=5)])
    assert (free.finish, len(free.sampled)) == (FinishReason.LENGTH, 30)
    third = free.sampled[2]
    by_id = make_row("id", make_prompt(0, 9), tokens=30, seed=5, stop_token_ids=(third,))
    text = letters(free.sampled)
    by_text = make_row("text", make_prompt(0, 9), tokens=30, seed=5, stop=("no such text", text[7:10]))
    by_limit = make_row("limit", make_prompt(0, 9), tokens=30, limit=9 + 4, seed=5)
    run(make_batcher(model), [by_id, by_text, by_limit])
    assert (by_id.finish, by_id.sampled) == (FinishReason.STOP, free.sampled[:3])
    assert (by_text.finish, by_text.sampled) == (FinishReason.STOP, free.sampled[:10])
    assert (by_limit.finish, by_limit.sampled) == (FinishReason.LENGTH, free.sampled[:4])


def test_a_stop_string_may_span_many_tokens_and_start_within_one():
    words = ["x ab", "c", "", "d", "e"]
    row = make_row("a", [5], tokens=9, stop=("bcde",))
    batcher = Batcher(small_llama(), lambda ids: "".join(words[i] for i in ids), max_batch=1, cache_tokens=8192)
    for token in range(5):
        row.sampled.append(token)
        assert batcher._ends_with_stop(row) == (token == 4)


def test_rows_that_do_not_fit_wait_their_turn():
    # 1024 slots less a quarter are 768; a row of up to 150 tokens takes 192 of them, and so does row 0
    batcher = make_batcher(cache_tokens=1024, max_batch=8)
    rows = [make_row(str(i), make_prompt(i, 30), tokens=120, seed=i) for i in range(7)]
    for row in rows:
        row.stop_ids = frozenset()
        batcher.submit(row)
    batcher.step()
    assert (len(batcher.started), len(batcher.waiting)) == (3, 4)
    assert len(run(batcher, [])) == 7
    assert all(len(row.sampled) == 120 for row in rows)


def test_many_short_rows_fit_after_a_long_one():
    model = small_llama()
    batcher = make_batcher(model, cache_tokens=2048, max_batch=20)
    longest = batcher.longest
    long = make_row("long", make_prompt(0, longest - 8), tokens=8)
    short = [make_row(str(i), make_prompt(i, 20), tokens=6, seed=i) for i in range(20)]
    for row in run(batcher, [long, *short]):
        expected = dense_logprobs(model, row.prompt, row.sampled, row.sampling)
        np.testing.assert_allclose(row.logprobs, expected, atol=EXACT)


def test_others_decode_while_a_long_prompt_is_filled():
    model = small_llama(max_position_embeddings=2048)
    # so few slots that room is made without any to spare
    batcher = make_batcher(model, cache_tokens=10240, min_rows=4)
    short, long = make_row("short", make_prompt(0, 9), tokens=12), make_row("long", make_prompt(1, 1500), tokens=8)
    short.stop_ids = frozenset()
    batcher.submit(short)
    batcher.step()
    batcher.submit(long)
    batcher.step()
    assert (len(short.sampled), len(long.sampled)) == (2, 0)
    for row in run(batcher, []):
        expected = dense_logprobs(model, row.prompt, row.sampled, row.sampling)
        np.testing.assert_allclose(row.logprobs, expected, atol=EXACT)


def test_removing_rows_leaves_the_others_alone():
    model = small_llama()
    rows = [make_row(str(i), make_prompt(i, 25), tokens=10, seed=i) for i in range(6)]
    expected = [
        run(make_batcher(model), [make_row(str(i), make_prompt(i, 25), tokens=10, seed=i)])[0] for i in range(6)
    ]
    batcher = make_batcher(model, max_batch=4)
    for row in rows:
        batcher.submit(row)
    for _ in range(3):
        batcher.step()
    removed = {0, 3, 5}  # two that run and one that waits
    for index in removed:
        batcher.remove(rows[index])
    run(batcher, [])
    for index in set(range(6)) - removed:
        assert rows[index].sampled == expected[index].sampled


def test_broken_weights_fail_the_rows_and_not_the_batch():
    model = small_llama()
    batcher = make_batcher(model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    (row,) = run(batcher, [make_row("a", make_prompt(0, 9))])
    assert row.sampled == []
    assert "not finite after 9 tokens under policy version 0" in str(row.error)
