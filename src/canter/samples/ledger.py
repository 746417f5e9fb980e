"""The audit of a batch against the committed calls: every sampled token is trained once, or not with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from canter.samples.batch import Batch
from canter.types import Call, Sample


def audit(batch: Batch, calls: Iterable[Call]) -> list[str]:
    """What is wrong with the batch, one line each; empty if nothing is.

    Works from the samples' arrays and the calls alone: which positions are trained, that their ids, logprobs and
    versions are those of the call, that no other position is trained, and that each call's tokens are trained in
    exactly one sample or have a reason in `batch.untrained`. `calls` are those of the batch's rollouts.
    """
    index = {call.id: call for call in calls}
    wrong: list[str] = []
    trained: Counter[str] = Counter()
    for sample in batch.samples:
        wrong += _check_sample(sample, index, trained)
    for call in index.values():
        times, reason = trained[call.id], batch.untrained.get(call.id)
        if times > 1:
            wrong.append(f"call {call.id} is trained {times} times")
        elif times and reason is not None:
            wrong.append(f"call {call.id} is trained although it is {reason}")
        elif not times and reason is None and len(call.sampled):
            wrong.append(f"call {call.id} is not trained, and no reason says why")
    return wrong


def _check_sample(sample: Sample, index: Mapping[str, Call], trained: Counter[str]) -> list[str]:
    """Adds the calls that this sample trains to `trained`; returns what is wrong."""
    name = f"sample {sample.chain} of {sample.rollout_id}"
    if missing := [call_id for call_id in sample.calls if call_id not in index]:
        return [f"{name} has calls that were never committed: {', '.join(missing)}"]
    wrong: list[str] = []
    left = sample.mask.copy()
    end = 0
    for call in (index[call_id] for call_id in sample.calls):
        start, end = call.prompt_len, call.prompt_len + len(call.sampled)
        if not np.array_equal(sample.ids[start:end], call.sampled):
            wrong.append(f"{name}: tokens {start} to {end} are not those that call {call.id} sampled")
        mask = left[start:end]
        if mask.all() and len(mask):
            trained[call.id] += 1
            wrong += _check_trained(sample, call, name)
        elif mask.any():
            wrong.append(f"{name} trains {int(mask.sum())} of the {len(mask)} tokens of call {call.id}")
        left[start:end] = False
    if left.any():
        wrong.append(f"{name} trains {int(left.sum())} tokens that nobody sampled")
    if end != len(sample.ids):
        wrong.append(f"{name} has {len(sample.ids)} tokens, its calls {end}")
    return wrong


def _check_trained(sample: Sample, call: Call, name: str) -> list[str]:
    start, end = call.prompt_len, call.prompt_len + len(call.sampled)
    wrong: list[str] = []
    if not np.array_equal(sample.logprobs[start:end], np.asarray(call.logprobs, np.float32)):
        wrong.append(f"{name}: the logprobs of call {call.id} are not those of its sampling")
    for span in call.versions:
        if (sample.versions[start + span.start : start + span.end] != span.version).any():
            wrong.append(f"{name}: tokens of call {call.id} do not have version {span.version}")
    return wrong
