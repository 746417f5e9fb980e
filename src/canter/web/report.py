"""`report.html`: one run as a single static page, without scripts and without network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from canter.types import Reason
from canter.web.curve import draw
from canter.web.examples import Example

LONGEST_TURN = 8000
"""Characters of a turn that are shown."""

MEANING: Mapping[str, str] = {
    Reason.SPAWN_ERROR: "the harness could not be started",
    Reason.NODE_LOST: "the machine was lost",
    Reason.GATEWAY_UNAVAILABLE: "the gateway did not answer",
    Reason.ENGINE_UNAVAILABLE: "no engine answered",
    Reason.GRADER_ERROR: "the grader failed",
    Reason.GRADER_TIMEOUT: "the grader took too long",
    Reason.INTERRUPTED: "the run was stopped meanwhile",
    Reason.NO_CALLS: "the harness never called the model",
    Reason.NO_REWARD: "no reward was given",
    Reason.NOT_FINITE: "a reward or logprob was not a finite number",
    Reason.CANCELLED: "cancelled, usually at the step's deadline",
    Reason.MISSING_LOGPROBS: "the engine gave no logprobs",
    Reason.LENGTH_MISMATCH: "token ids and logprobs differ in number",
    Reason.MISSING_VERSION: "the policy version of a token is unknown",
    Reason.ORPHANED: "the prompt cannot be rebuilt",
    Reason.CLIENT_GONE: "the harness hung up before the reply",
    Reason.SUPERSEDED_ATTEMPT: "made by an attempt that was replaced",
    Reason.LABEL_EXCLUDED: "its label is not trained",
    Reason.FROZEN_MODEL: "sampled from a model that is not trained",
    Reason.GROUP_TOO_SMALL: "fewer than two scored rollouts in the group",
    Reason.NO_SPREAD: "all rewards of the group were the same",
    Reason.TOO_LONG: "a sample was longer than the limit",
    Reason.STALE: "sampled from a policy that is too old",
}


def render_report(
    manifest: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], examples: Sequence[Example] = ()
) -> str:
    """The page. Missing parts are left out; every text is escaped: what an agent wrote is shown, never interpreted.

    manifest  as in `manifest.json`; read here are `run`, `created_at`, `train_wall_s`, `seed`, `code`, `harness`,
              `settings`, `hardware`, and `evaluation` (`before`, `after`: shares solved; `details` and `comparison` as
              `canter.evaluate.evaluation` makes them)
    metrics   the rows of `metrics.jsonl`; read here are `step`, `reward_mean`, `rollouts`, `sampled_tokens`, `dropped`
    examples  rollouts to read
    """
    evaluation = _mapping(manifest.get("evaluation"))
    page = _template().render(
        run=str(manifest.get("run") or "run"),
        facts=_facts(manifest, metrics),
        before=_number(evaluation.get("before")),
        after=_number(evaluation.get("after")),
        evaluated=_evaluated(evaluation),
        comparison=_mapping(evaluation.get("comparison")),
        curve=draw([(float(row["step"]), _number(row.get("reward_mean"))) for row in metrics]),
        drops=[(reason, count, MEANING.get(reason, "")) for reason, count in _total(metrics, "dropped").most_common()],
        rollouts=sum(int(row.get("rollouts") or 0) for row in metrics),
        examples=examples,
        settings=json.dumps(manifest.get("settings"), indent=2) if manifest.get("settings") else "",
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which JSON can carry and UTF-8 cannot


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("canter.web", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in (percent, points, interval, number, clipped)}
    return environment.get_template("report.html")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def points(difference: float | None) -> str:
    """A difference of shares, in percentage points with its sign."""
    return "–" if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def interval(shares: Sequence[float] | None) -> str:
    return f"{percent(shares[0])} to {percent(shares[1])}" if shares else "–"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")


def clipped(text: str) -> str:
    """The text, its middle left out (and said so) where it is too long to read."""
    if len(text) <= LONGEST_TURN:
        return text
    half = LONGEST_TURN // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out …]\n\n{text[-half:]}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _facts(manifest: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The line of facts under the title: those that are known."""
    settings, hardware = _mapping(manifest.get("settings")), _mapping(manifest.get("hardware"))
    harness, code = _mapping(manifest.get("harness")), _mapping(manifest.get("code"))
    created, wall = _number(manifest.get("created_at")), _number(manifest.get("train_wall_s"))
    tokens = sum(int(row.get("sampled_tokens") or 0) for row in metrics)
    found = [
        ("model", _mapping(settings.get("model")).get("path")),
        ("harness", " ".join(str(harness[key]) for key in ("name", "version") if harness.get(key))),
        ("steps", f"{len(metrics):,}" if metrics else None),
        ("training", duration(wall) if wall is not None else None),
        ("sampled", f"{tokens:,} tokens" if tokens else None),
        ("hardware", f"{hardware['cores']} cores, {hardware.get('cpu', '')}" if "cores" in hardware else None),
        ("seed", manifest.get("seed")),
        ("started", f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M} UTC" if created is not None else None),
        ("canter", " ".join(str(code[key])[:12] for key in ("canter", "commit") if code.get(key))),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _evaluated(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row of the table for each evaluation that was made."""
    details = _mapping(evaluation.get("details"))
    rows = []
    for name in ("before", "after"):
        share, detail = _number(evaluation.get(name)), _mapping(details.get(name))
        if share is None and not detail:
            continue
        invalid = _mapping(detail.get("invalid"))
        rows.append(
            {
                "name": name,
                "solved": share,
                "interval": detail.get("interval"),
                "n": _number(detail.get("n")),
                "mean_reward": _number(detail.get("mean_reward")),
                "invalid": ", ".join(f"{reason} {count}" for reason, count in invalid.items()),
            }
        )
    return rows


def _total(metrics: Sequence[Mapping[str, Any]], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in metrics:
        total.update({str(reason): int(count) for reason, count in _mapping(row.get(name)).items()})
    return total


def _mapping(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one where there is something else or nothing."""
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
