"""What the run imposes on a call's sampling, whatever the harness asked for; both are recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from canter.config.tree import SamplingConfig
from canter.errors import ContextOverflow
from canter.types import Ids, Sampling, Split

REQUESTABLE = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs",
    "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "tool_choice",
    "parallel_tool_calls", "response_format", "reasoning_effort", "echo", "suffix", "best_of", "max_output_tokens",
    "max_tool_calls", "text", "reasoning", "truncation",
)  # fmt: skip
"""Fields of a request that say how to sample."""

_NOT_ENFORCED = (
    "response_format",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
)
_NO_CHOICE = (None, "auto", "none")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a reply: the run's settings and the engine's context, in tokens."""

    config: SamplingConfig
    split: Split
    context_tokens: int

    @property
    def temperature(self) -> float:
        """That of the split: evaluation may have its own."""
        eval_temperature = self.config.eval_temperature
        if self.split is Split.EVAL and eval_temperature is not None:
            return eval_temperature
        return self.config.temperature


def admit(
    limits: Limits,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    seed: int | None,
) -> Sampling:
    """The sampling that is imposed: the run's temperature and bounds, the harness's stop strings and, where smaller,
    its `max_tokens`. Raises `ContextOverflow` where not even one token fits behind the prompt."""
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, limits.context_tokens)
    wanted = limits.config.max_tokens if max_tokens is None else min(max_tokens, limits.config.max_tokens)
    return Sampling(
        temperature=limits.temperature,
        top_p=limits.config.top_p,
        top_k=limits.config.top_k,
        max_tokens=min(wanted, room),
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
    )


def requested(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness asked for, as it asked."""
    return {name: body[name] for name in REQUESTABLE if body.get(name) is not None}


def effective(sampling: Sampling, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was applied; `not_enforced` names what was asked for and could only have been had by changing the
    distribution that is trained."""
    applied: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }
    if sampling.stop:
        applied["stop"] = list(sampling.stop)
    ignored = [name for name in _NOT_ENFORCED if name in asked]
    ignored += [name for name in ("text", "output_config") if _has_format(asked.get(name))]
    if asked.get("truncation") == "auto":
        ignored.append("truncation")
    if _forces(asked.get("tool_choice")):
        ignored.append("tool_choice")
    if ignored:
        applied["not_enforced"] = ignored
    return applied


def _has_format(config: object) -> bool:
    """Whether Responses' `text` or Messages' `output_config` asks for anything but text."""
    format_ = config.get("format") if isinstance(config, Mapping) else None
    return isinstance(format_, Mapping) and format_.get("type") != "text"


def _forces(choice: object) -> bool:
    """Whether a `tool_choice` asks for more than a choice of tools, which the prompt honours."""
    if isinstance(choice, Mapping):
        inner = choice.get("allowed_tools")
        mode = inner.get("mode") if isinstance(inner, Mapping) else choice.get("mode")  # as in Chat, as in Responses
        return not (choice.get("type") == "allowed_tools" and mode == "auto")
    return choice not in _NO_CHOICE


def prompt_digest(prompt: Ids) -> bytes:
    """Names a prompt, to count how often an attempt has sent it."""
    return hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").tobytes(), digest_size=16).digest()


def call_seed(rollout_seed: int, prompt: bytes, earlier: int) -> int:
    """The seed of a call: the same for the same rollout seed, prompt digest and number of `earlier` calls of the
    attempt with that prompt, so that a run reproduces whatever runs beside it. Below 2**63."""
    text = b"%d|%s|%d" % (rollout_seed, prompt.hex().encode(), earlier)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
