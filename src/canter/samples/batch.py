"""Scored rollouts and their calls, made into the batch that the trainer learns from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as concat

import numpy as np

from canter.samples.advantages import ADVANTAGES, AdvantageName, flat
from canter.samples.mask import untrained, whole
from canter.samples.merge import Chain, lay_out, merge
from canter.samples.report import Report, Tokens
from canter.samples.weights import WEIGHTS, NormaliseName
from canter.types import Call, ForkCause, Reason, Rollout, RolloutState, Sample

Calls = Mapping[str, Sequence[Call]] | Iterable[Call]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update learns from.

    samples    ordered by group, index and chain; every one has at least one trained token
    rollouts   N of the loss: the rollouts that `samples` come from. One whose advantage is 0 counts (its samples are
               there), a dropped one does not
    untrained  for every call whose sampled tokens are not trained, the reason
    report     the account in numbers
    """

    samples: tuple[Sample, ...]
    rollouts: int
    untrained: Mapping[str, Reason]
    report: Report


@dataclass(frozen=True, slots=True)
class History:
    """What a rollout did: all its committed calls, which of them are untrained and why, and the chains of the
    current attempt."""

    calls: tuple[Call, ...]
    reasons: Mapping[str, Reason]
    chains: tuple[Chain, ...]


def build(
    rollouts: Iterable[Rollout],
    calls: Calls,
    *,
    advantage: AdvantageName = "grpo",
    normalise: NormaliseName = "rollout_mean",
    keep_flat_groups: bool = True,
    max_tokens: int | None = None,
    labels: Collection[str] | None = None,
) -> Batch:
    """Samples of the rollouts that count, and an account of everything else.

    `calls` are those of the rollouts, in any order, flat or by rollout id; others are ignored. Advantages are taken
    over all scored rollouts of a group before anything is dropped, and only whole rollouts and whole groups are
    dropped: a rollout for its own reason, for having nothing to train, or `TOO_LONG` (a sample of more than
    `max_tokens`); a group as `GROUP_TOO_SMALL` (fewer than two scored) or `NO_SPREAD` (unless `keep_flat_groups`).
    `labels` are the call labels to train, `None` for all. Bad data never raises: it is dropped or masked with a
    reason. The result does not depend on the order of the arguments.
    """
    ordered = sorted({rollout.id: rollout for rollout in rollouts}.values(), key=lambda r: (r.group, r.index, r.id))
    histories = _histories(ordered, calls, labels)
    dropped = {rollout.id: reason for rollout in ordered if (reason := unscored(rollout)) is not None}
    scored = _by_group(rollout for rollout in ordered if rollout.id not in dropped)
    credit, refused = _credit(scored, advantage, keep_flat_groups)
    dropped |= refused
    for rollout_id in credit:
        if (reason := _unusable(histories[rollout_id], max_tokens)) is not None:
            dropped[rollout_id] = reason
    kept = [rollout for rollout in ordered if rollout.id not in dropped]
    weights = WEIGHTS[normalise]([[c.trained_tokens for c in histories[r.id].chains] for r in kept])
    samples = tuple(
        _sample(rollout, number, chain, weight, credit[rollout.id])
        for rollout, row in zip(kept, weights, strict=True)
        for number, (chain, weight) in enumerate(zip(histories[rollout.id].chains, row, strict=True))
    )
    reasons = _untrained(histories, dropped)
    return Batch(samples, len(kept), reasons, _report(ordered, scored, histories, dropped, reasons, samples))


def unscored(rollout: Rollout) -> Reason | None:
    """Why a rollout is outside its group's baseline; `None` if it has a reward that counts."""
    if rollout.state is RolloutState.CANCELLED:
        return rollout.reason or Reason.CANCELLED
    if rollout.state is not RolloutState.SCORED:
        return rollout.reason or Reason.NO_REWARD
    if rollout.reward is None:
        return Reason.NO_REWARD
    return None if np.isfinite(rollout.reward) else Reason.NOT_FINITE


def _histories(rollouts: Sequence[Rollout], calls: Calls, labels: Collection[str] | None) -> dict[str, History]:
    found: dict[str, dict[str, Call]] = {rollout.id: {} for rollout in rollouts}
    for call in concat.from_iterable(calls.values()) if isinstance(calls, Mapping) else calls:
        if call.rollout_id in found:
            found[call.rollout_id][call.id] = call
    return {rollout.id: _history(rollout, found[rollout.id].values(), labels) for rollout in rollouts}


def _history(rollout: Rollout, calls: Collection[Call], labels: Collection[str] | None) -> History:
    current = [call for call in calls if call.attempt == rollout.attempt]
    reasons = untrained(current, labels)
    chains = merge(current, reasons)
    superseded = {call.id: Reason.SUPERSEDED_ATTEMPT for call in calls if call.attempt != rollout.attempt}
    return History(tuple(calls), reasons | superseded, tuple(chains))


def _by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    return groups


def _credit(
    scored: Mapping[str, Sequence[Rollout]], advantage: AdvantageName, keep_flat: bool
) -> tuple[dict[str, float], dict[str, Reason]]:
    """Advantage by rollout, and the rollouts of the groups that give none, with the reason."""
    credit: dict[str, float] = {}
    refused: dict[str, Reason] = {}
    for group in scored.values():
        rewards = np.array([rollout.reward for rollout in group], np.float64)
        reason = None
        if len(group) < 2:
            reason = Reason.GROUP_TOO_SMALL
        elif not keep_flat and flat(rewards):
            reason = Reason.NO_SPREAD
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values = ADVANTAGES[advantage](rewards)
            if np.isfinite(values).all():
                credit |= {rollout.id: float(value) for rollout, value in zip(group, values, strict=True)}
            else:  # rewards so large that their sum overflows
                reason = Reason.NOT_FINITE
        if reason is not None:
            refused |= {rollout.id: reason for rollout in group}
    return credit, refused


def _unusable(history: History, max_tokens: int | None) -> Reason | None:
    """Why a scored rollout gives no samples; where all its calls are untrained, the reason of most of its tokens."""
    if not history.chains:
        lost: Counter[Reason] = Counter()
        for call in history.calls:
            reason = history.reasons.get(call.id)
            if reason is not None and reason is not Reason.SUPERSEDED_ATTEMPT:
                lost[reason] += len(call.sampled)
        return max(lost, key=lambda reason: (lost[reason], reason), default=Reason.NO_CALLS)
    if max_tokens is not None and any(chain.length > max_tokens for chain in history.chains):
        return Reason.TOO_LONG
    return None


def _sample(rollout: Rollout, number: int, chain: Chain, weight: float, advantage: float) -> Sample:
    row = lay_out(chain)
    return Sample(
        rollout_id=rollout.id,
        group=rollout.group,
        chain=number,
        ids=row.ids,
        mask=row.mask,
        logprobs=row.logprobs,
        versions=row.versions,
        weight=weight,
        advantage=advantage,
        reward=float(rollout.reward or 0.0),
        calls=tuple(call.id for call in chain.calls),
        label=chain.label,
    )


def _untrained(histories: Mapping[str, History], dropped: Mapping[str, Reason]) -> dict[str, Reason]:
    """The reason of every untrained call: its own, else that of its rollout."""
    reasons: dict[str, Reason] = {}
    for rollout_id, history in histories.items():
        if rollout_id in dropped:
            reasons |= {call.id: dropped[rollout_id] for call in history.calls}
        reasons |= history.reasons
    return reasons


def _report(
    rollouts: Sequence[Rollout],
    scored: Mapping[str, Sequence[Rollout]],
    histories: Mapping[str, History],
    dropped: Mapping[str, Reason],
    reasons: Mapping[str, Reason],
    samples: Sequence[Sample],
) -> Report:
    calls = [call for history in histories.values() for call in history.calls]
    lost: Counter[Reason] = Counter()
    for call in calls:
        if call.id in reasons:
            lost[reasons[call.id]] += len(call.sampled)
    kept = [histories[rollout.id] for rollout in rollouts if rollout.id not in dropped]
    trained = sum(chain.trained_tokens for history in kept for chain in history.chains)
    return Report(
        rollouts=len(rollouts),
        in_batch=len(kept),
        states=Counter(rollout.state for rollout in rollouts),
        dropped=Counter(dropped.values()),
        samples_per_rollout=Counter(len(history.chains) for history in kept),
        calls=len(calls),
        untrained_calls=Counter(reasons[call.id] for call in calls if call.id in reasons),
        forks=_forks(histories.values()),
        tokens=Tokens(
            sampled=sum(len(call.sampled) for call in calls),
            trained=trained,
            untrained={reason: tokens for reason, tokens in lost.items() if tokens},
            context=sum(len(sample.ids) for sample in samples) - trained,
        ),
        rewards={group: tuple(float(r.reward or 0.0) for r in members) for group, members in scored.items()},
    )


def _forks(histories: Iterable[History]) -> Counter[ForkCause]:
    """Forks of all committed calls by cause; one that nobody explained is `UNKNOWN`."""
    forks: Counter[ForkCause] = Counter()
    for history in histories:
        wholes = {call.id: whole(call) for call in history.calls}
        for call in history.calls:
            parent = call.parent_id
            if call.fork is not None:
                forks[call.fork] += 1
            elif parent is not None and call.prefix_len != wholes.get(parent, -1):
                forks[ForkCause.UNKNOWN] += 1
    return forks
