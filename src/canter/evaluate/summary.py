"""What the rollouts of an evaluation say about a policy, and two evaluations about each other.

Invalid and cancelled rollouts say nothing about the policy: they leave every share and mean, and are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from canter.evaluate.statistics import Interval, bootstrap_mean, mean_pass_at_k, sign_test, wilson
from canter.samples.batch import unscored
from canter.types import Rollout

Results = dict[str, list[bool]]
"""For each task id, which of its scored rollouts are solved."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on held-out tasks.

    solved       Pass@1: mean over tasks of the share of their rollouts that are solved; None without scored rollouts
    interval     95 % interval of `solved` (Wilson, with the tasks as trials: exact for one rollout per task,
                 conservative for several, which do not count as independent)
    n            scored rollouts, over `tasks` tasks
    invalid      rollouts that are not scored, by reason
    mean_reward  over scored rollouts
    pass_at      Pass@k for k = 1, 2, 4, … as far as every task has as many scored rollouts
    """

    solved: float | None
    interval: Interval | None
    n: int
    tasks: int
    invalid: Mapping[str, int]
    mean_reward: float | None
    pass_at: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["interval"] = list(self.interval) if self.interval else None
        values["pass_at"] = {str(k): value for k, value in self.pass_at.items()}
        return values


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations, task by task, over the tasks that both have scored rollouts of.

    difference  mean over tasks of share solved after minus before; None without a common task
    interval    95 % interval of the difference (paired: bootstrap over tasks)
    better      tasks solved more often after; `worse` less often, `same` as often
    p           two-sided exact sign test of better against worse
    """

    difference: float | None
    interval: Interval | None
    tasks: int
    better: int
    worse: int
    same: int
    p: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"interval": list(self.interval) if self.interval else None}


def summarise(rollouts: Sequence[Rollout], *, solved_at: float = 1.0) -> Summary:
    """The summary of one evaluation; a rollout is solved if its reward is at least `solved_at`."""
    invalid = Counter(str(reason) for reason in map(unscored, rollouts) if reason is not None)
    rewards = [rollout.reward for rollout in rollouts if unscored(rollout) is None and rollout.reward is not None]
    results = _results(rollouts, solved_at)
    solved = fmean(fmean(runs) for runs in results.values()) if results else None
    return Summary(
        solved=solved,
        interval=None if solved is None else wilson(solved, len(results)),
        n=len(rewards),
        tasks=len(results),
        invalid=dict(sorted(invalid.items())),
        mean_reward=fmean(rewards) if rewards else None,
        pass_at=_pass_at(results),
    )


def compare(before: Sequence[Rollout], after: Sequence[Rollout], *, solved_at: float = 1.0) -> Comparison:
    """The paired comparison of two evaluations on the same tasks."""
    first, second = _results(before, solved_at), _results(after, solved_at)
    common = sorted(first.keys() & second.keys())
    differences = [fmean(second[task]) - fmean(first[task]) for task in common]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Comparison(
        difference=fmean(differences) if differences else None,
        interval=bootstrap_mean(differences) if differences else None,
        tasks=len(common),
        better=better,
        worse=worse,
        same=len(common) - better - worse,
        p=sign_test(better, worse),
    )


def evaluation(
    before: Sequence[Rollout] | None, after: Sequence[Rollout] | None, *, solved_at: float = 1.0
) -> dict[str, Any]:
    """The manifest's `evaluation`: `before` and `after` are shares solved (None where not evaluated), `details` their
    summaries, `comparison` the paired one where there are both."""
    runs = {"before": before, "after": after}
    details = {name: summarise(found, solved_at=solved_at) for name, found in runs.items() if found is not None}
    values: dict[str, Any] = {name: details[name].solved if name in details else None for name in runs}
    values["details"] = {name: summary.to_json() for name, summary in details.items()}
    if before is not None and after is not None:
        values["comparison"] = compare(before, after, solved_at=solved_at).to_json()
    return values


def _results(rollouts: Sequence[Rollout], solved_at: float) -> Results:
    results: Results = defaultdict(list)
    for rollout in rollouts:
        if unscored(rollout) is None and rollout.reward is not None:
            results[rollout.task.id].append(rollout.reward >= solved_at)
    return results


def _pass_at(results: Results) -> dict[int, float]:
    most = min(map(len, results.values()), default=0)
    counts = [(len(runs), sum(runs)) for runs in results.values()]
    return {k: mean_pass_at_k(counts, k) for k in (1 << n for n in range(most.bit_length()))}
