"""The values that cross Canter's borders: frozen, checked when they are made.

Arrays are one-dimensional numpy arrays: token ids `int32`, logprobs `float32`, policy versions
`int32`. The words (rollout, attempt, call, chain, sample, …) are those of `docs/concepts.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]

NO_IDS: Ids = np.zeros(0, np.int32)
NO_LOGPROBS: Logprobs = np.zeros(0, np.float32)


class RolloutState(StrEnum):
    """Where a rollout is in its life; `scored`, `invalid` and `cancelled` are final."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    SCORED = "scored"
    INVALID = "invalid"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (RolloutState.SCORED, RolloutState.INVALID, RolloutState.CANCELLED)


class Reason(StrEnum):
    """Why a rollout is invalid, a sample untrainable or a group left out; each has a counter."""

    # infrastructure: another attempt is made while there are any left
    SPAWN_ERROR = "spawn_error"
    NODE_LOST = "node_lost"
    GATEWAY_UNAVAILABLE = "gateway_unavailable"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    # the run was stopped: another attempt is made, whatever is left
    INTERRUPTED = "interrupted"
    # the grader: it runs again, not the harness
    GRADER_ERROR = "grader_error"
    GRADER_TIMEOUT = "grader_timeout"
    # the rollout itself
    NO_CALLS = "no_calls"
    NO_REWARD = "no_reward"
    NOT_FINITE = "not_finite"
    CANCELLED = "cancelled"
    # a call
    MISSING_LOGPROBS = "missing_logprobs"
    LENGTH_MISMATCH = "length_mismatch"
    MISSING_VERSION = "missing_version"
    ORPHANED = "orphaned"
    CLIENT_GONE = "client_gone"
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    LABEL_EXCLUDED = "label_excluded"
    FROZEN_MODEL = "frozen_model"
    # a group
    GROUP_TOO_SMALL = "group_too_small"
    NO_SPREAD = "no_spread"
    TOO_LONG = "too_long"
    STALE = "stale"


RETRYABLE = frozenset(
    {
        Reason.SPAWN_ERROR,
        Reason.NODE_LOST,
        Reason.GATEWAY_UNAVAILABLE,
        Reason.ENGINE_UNAVAILABLE,
        Reason.INTERRUPTED,
    }
)
"""Reasons that are the infrastructure's fault: the rollout gets another attempt."""


class Outcome(StrEnum):
    """How the harness process of an attempt ended."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    LOST = "lost"
    SPAWN_FAILED = "spawn_failed"


class ForkCause(StrEnum):
    """Why a call does not extend its proposed parent token for token."""

    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    EDITED_HISTORY = "edited_history"
    DROPPED_TURN = "dropped_turn"
    DROPPED_REASONING = "dropped_reasoning"
    TOOL_ARGUMENTS = "tool_arguments"
    TEMPLATE = "template"
    TOKENISATION = "tokenisation"
    TRUNCATED = "truncated"
    SIDE_REQUEST = "side_request"
    UNKNOWN = "unknown"


class CallStatus(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    ERROR = "error"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class KeyKind(StrEnum):
    """What a key may do: `agent` call the model for one attempt; `grader` read that attempt's hidden part and
    post its reward; `service` lifecycle, events and samples (controller, trainer); `admin` everything."""

    AGENT = "agent"
    GRADER = "grader"
    SERVICE = "service"
    ADMIN = "admin"


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a data set. `hidden` never reaches the harness's process, environment or files."""

    id: str
    prompt: str
    input: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)

    def public(self) -> dict[str, Any]:
        """The part that the harness may see."""
        return {"id": self.id, "prompt": self.prompt, "input": dict(self.input)}


@dataclass(frozen=True, slots=True)
class Rollout:
    """One complete attempt-chain at a task. Times are Unix seconds; `attempt` is 0 before the first starts."""

    id: str
    group: str
    task: Task
    split: Split = Split.TRAIN
    step: int = 0
    index: int = 0
    seed: int = 0
    state: RolloutState = RolloutState.QUEUED
    attempt: int = 0
    max_attempts: int = 3
    reward: float | None = None
    reason: Reason | None = None
    message: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of the harness for a rollout.

    `process` is what the runner needs to find the execution again after a restart (for the process
    runner `{"pid": int, "start": int, "dir": str}`). A sealed attempt accepts no more model calls.
    """

    rollout_id: str
    number: int
    sealed: bool = False
    process: Mapping[str, Any] = field(default_factory=dict)
    outcome: Outcome | None = None
    exit_code: int | None = None
    reason: Reason | None = None
    message: str = ""
    started_at: float = 0.0
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as the engine applies them. `top_k` 0, `top_p` 1 mean off; `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"top_k must be >= 0 and max_tokens >= 1, got {self.top_k} and {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of a call came from policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One model request and its reply, exactly as the engine saw it.

    The prompt is kept as a delta: `prompt = (parent.prompt + parent.sampled)[:prefix_len] + suffix`, and
    `prefix_len == 0` where there is no parent. A call *extends* its parent if `prefix_len` is the parent's
    whole length. `ordinal` numbers the calls of an attempt in the order in which they arrived.
    `untrainable` says why its tokens may not be trained, `None` that they may.
    """

    id: str
    rollout_id: str
    attempt: int
    ordinal: int
    parent_id: str | None
    prefix_len: int
    suffix: Ids
    sampled: Ids
    logprobs: Logprobs
    versions: tuple[VersionSpan, ...]
    status: CallStatus = CallStatus.OK
    finish_reason: FinishReason | None = None
    untrainable: Reason | None = None
    label: str = "main"
    dialect: str = "chat"
    model: str = ""
    fork: ForkCause | None = None
    proposed_parent_id: str | None = None
    fork_at: int | None = None
    requested: Mapping[str, Any] = field(default_factory=dict)
    effective: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def prompt_len(self) -> int:
        return self.prefix_len + len(self.suffix)


@dataclass(frozen=True, slots=True)
class CallBodies:
    """The raw request and reply of a call, as bytes of JSON."""

    request: bytes
    reply: bytes


@dataclass(frozen=True, slots=True)
class Reward:
    """What the grader (or the run's rule for a time-out) gave an attempt; always finite."""

    rollout_id: str
    attempt: int
    value: float
    source: str = "grader"
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a reward must be a finite number, got {self.value}")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the store's append-only log; `seq` grows by one and is what watchers resume from."""

    seq: int
    at: float
    kind: str
    rollout_id: str | None
    attempt: int | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An inference server that the gateway may use."""

    url: str
    model: str
    version: int
    seen_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published policy: `version` grows by one with each update; version 0 is the model as given."""

    version: int
    step: int
    path: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine returns: ids (the stop token included), their logprobs under the sampling distribution,
    version spans over `[0, len(ids))`, and why it stopped."""

    ids: Ids
    logprobs: Logprobs
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence for the trainer; one array entry per token (length T).

    ids       int32[T]    exactly what the engine saw
    mask      bool[T]     true where the token was sampled by the policy and is trained here
    logprobs  float32[T]  behaviour logprob where mask, else 0
    versions  int32[T]    policy version that sampled the token where mask, else -1
    weight    float       weight of each trained token in the loss; summed over a rollout's trained tokens it is
                          the same for every rollout, however it was cut (for `rollout_mean`: 1 / T_r)
    advantage float       of the rollout within its group
    """

    rollout_id: str
    group: str
    chain: int
    ids: Ids
    mask: NDArray[np.bool_]
    logprobs: Logprobs
    versions: NDArray[np.int32]
    weight: float = 1.0
    advantage: float = 0.0
    reward: float = 0.0
    calls: tuple[str, ...] = ()
    label: str = "main"

    def __post_init__(self) -> None:
        n = len(self.ids)
        if not (len(self.mask) == len(self.logprobs) == len(self.versions) == n):
            raise ValueError(
                f"sample of {self.rollout_id}: ids, mask, logprobs and versions must have one length, got "
                f"{n}, {len(self.mask)}, {len(self.logprobs)}, {len(self.versions)}"
            )
        if not np.isfinite(self.logprobs[self.mask]).all():
            raise ValueError(f"sample of {self.rollout_id}: a trained token has no finite logprob")

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(self.mask.sum())


def as_ids(values: Sequence[int] | Ids) -> Ids:
    return np.asarray(values, dtype=np.int32)
