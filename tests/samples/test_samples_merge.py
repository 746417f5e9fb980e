import numpy as np
import pytest
from recorded_calls import Recorder

from canter.samples.mask import covers, untrained, why_untrained
from canter.samples.merge import lay_out, merge
from canter.types import NO_LOGPROBS, CallStatus, Reason, VersionSpan, as_ids


def names(chains):
    return [[int(call.id.rsplit("-", 1)[1]) for call in chain.calls] for chain in chains]


def test_a_linear_conversation_is_one_chain():
    r = Recorder()
    first = r.call([1, 2, 3])
    second = r.call([4], after=first)
    third = r.call([], 3, after=second)
    (chain,) = merge(r.calls)
    row = lay_out(chain)
    assert chain.calls == (first, second, third)
    assert row.ids.tolist() == r.full[third.id]
    assert row.mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 5
    assert row.versions.tolist() == [-1, -1, -1, 0, 0, -1, 1, 1, 2, 2, 2]
    assert np.array_equal(row.logprobs[row.mask], np.concatenate([c.logprobs for c in r.calls]))
    assert not row.logprobs[~row.mask].any()
    assert (chain.length, chain.trained_tokens) == (11, 7)


@pytest.mark.parametrize("keep", [0, 2, 3, 4, 5, 6, 8])
def test_a_fork_starts_a_chain_whose_shared_prefix_is_context(keep):
    r = Recorder()
    first = r.call([1, 2, 3])
    second = r.call([4], after=first)  # whole: 8 tokens
    fork = r.call([9, 9], after=second, keep=keep)
    leaf = r.call([7], after=fork)
    chains = merge(r.calls)
    if keep == 8:
        assert names(chains) == [[0, 1, 2, 3]]
        return
    assert names(chains) == [[0, 1], [2, 3]]
    row = lay_out(chains[1])
    assert row.ids.tolist() == r.full[leaf.id]
    assert row.mask.sum() == 4
    assert not row.mask[: keep + 2].any()


def test_shared_ancestors_are_trained_with_the_first_child_only():
    r = Recorder()
    root = r.call([1])
    middle = r.call([2], after=root)
    r.call([3], after=middle)
    r.call([4], after=middle)
    r.call([5], after=root)
    chains = merge(r.calls)
    assert names(chains) == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert [chain.trained for chain in chains] == [(True, True, True), (False, False, True), (False, True)]
    assert merge(reversed(r.calls)) == chains


def test_interleaved_conversations_are_told_apart():
    r = Recorder()
    main = r.call([1])
    sub = r.call([2], label="sub")
    main = r.call([3], after=main)
    sub = r.call([4], after=sub, label="sub")
    r.call([5], after=main)
    chains = merge(r.calls)
    assert names(chains) == [[0, 2, 4], [1, 3]]
    assert [chain.label for chain in chains] == ["main", "sub"]


def test_an_untrained_call_is_context_of_what_extends_it():
    r = Recorder()
    first = r.call([1], 2)
    bad = r.call([2], 2, after=first, logprobs=NO_LOGPROBS)
    last = r.call([3], 2, after=bad)
    (chain,) = merge(r.calls)
    row = lay_out(chain)
    assert row.ids.tolist() == r.full[last.id]
    assert row.mask.tolist() == [False, True, True, False, False, False, False, True, True]


def test_nothing_follows_the_last_trained_call():
    r = Recorder()
    first = r.call([1])
    gone = r.call([2] * 50, after=first, status=CallStatus.CANCELLED)
    r.call([3], 0, after=gone)
    retried = r.call([2], after=first)
    (chain,) = merge(r.calls)
    assert chain.calls == (first, retried)
    assert chain.trained == (True, True)


def test_equal_prompts_are_separate_samples():
    r = Recorder()
    r.call([1, 2])
    r.call([1, 2])
    assert names(merge(r.calls)) == [[0], [1]]


def test_an_empty_reply_does_not_break_its_chain():
    r = Recorder()
    empty = r.call([1], 0)
    last = r.call([2], after=empty)
    (chain,) = merge(r.calls)
    assert lay_out(chain).ids.tolist() == r.full[last.id]
    assert merge(r.calls[:1]) == []


def test_a_prompt_that_cannot_be_rebuilt_is_orphaned_with_all_that_hangs_on_it():
    r = Recorder()
    root = r.call([1])
    lost = r.call([2], after=root, parent_id="never-committed")
    short = r.call([3], after=root, prefix_len=99)
    r.call([4], after=lost)
    circle = r.call([5], after=root, parent_id="r0-1-5")
    r.call([6], after=circle)
    r.call([7], after=short, parent_id=None)
    r.call([8], after=lost, keep=0)  # shares nothing: needs nothing
    assert set(untrained(r.calls)) == {f"r0-1-{n}" for n in (1, 2, 3, 4, 5, 6)}
    assert set(untrained(r.calls).values()) == {Reason.ORPHANED}
    assert names(merge(r.calls)) == [[0], [7]]


def test_deep_conversations_need_no_recursion():
    r = Recorder()
    call = r.call([1])
    for _ in range(3000):
        call = r.call([1], 1, after=call)
    fork = r.call([5], after=call, keep=4000)
    chains = merge(r.calls)
    assert [len(chain.calls) for chain in chains] == [3001, 1]
    assert lay_out(chains[1]).ids.tolist() == r.full[fork.id]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"untrainable": Reason.FROZEN_MODEL, "logprobs": NO_LOGPROBS}, Reason.FROZEN_MODEL),
        ({"status": CallStatus.CANCELLED}, Reason.CLIENT_GONE),
        ({"status": CallStatus.ERROR}, Reason.ENGINE_UNAVAILABLE),
        ({"label": "title"}, Reason.LABEL_EXCLUDED),
        ({"logprobs": NO_LOGPROBS}, Reason.MISSING_LOGPROBS),
        ({"logprobs": np.zeros(3, np.float32)}, Reason.LENGTH_MISMATCH),
        ({"logprobs": np.array([-1, np.nan], np.float32)}, Reason.NOT_FINITE),
        ({"logprobs": np.array([-np.inf, -1], np.float32)}, Reason.NOT_FINITE),
        ({"versions": ()}, Reason.MISSING_VERSION),
        ({"versions": (VersionSpan(1, 0, 1),)}, Reason.MISSING_VERSION),
    ],
)
def test_why_a_call_is_untrained(changes, reason):
    assert why_untrained(Recorder().call([1], 2, **changes), {"main"}) is reason


@pytest.mark.parametrize(
    ("spans", "good"),
    [
        ([(0, 0, 4)], True),
        ([(1, 2, 4), (0, 0, 2)], True),
        ([(0, 0, 2), (1, 3, 4)], False),
        ([(0, 0, 3), (1, 2, 4)], False),
        ([(0, 0, 5)], False),
        ([(0, -1, 4)], False),
        ([(-1, 0, 4)], False),
        ([(0, 0, 4), (0, 4, 2)], False),
    ],
)
def test_version_spans_name_one_version_for_each_token(spans, good):
    assert covers([VersionSpan(*span) for span in spans], 4) is good


def test_versions_of_a_call_that_ran_through_an_update():
    r = Recorder()
    r.call([1], as_ids([5, 6, 7]).tolist(), versions=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)))
    (chain,) = merge(r.calls)
    assert lay_out(chain).versions.tolist() == [-1, 4, 5, 5]
