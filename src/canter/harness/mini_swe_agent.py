"""`harness.use = "mini-swe-agent"`: the unmodified mini-SWE-agent (PyPI `mini-swe-agent` 2.4) through its own command.

`mini` is called in a fork of a launcher that has imported it (litellm alone costs seconds), with the argv that one
would type in a shell. Its trajectory goes to `traj.json` in the attempt's folder, outside the working folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canter.errors import ConfigError
from canter.harness import Program, Seat

if TYPE_CHECKING:
    from canter.config import Config

NAME = "mini-swe-agent"
_RUN = "canter.harness.mini_process:run"

_ENVIRONMENT = {
    "MSWEA_CONFIGURED": "true",  # no first-start wizard
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of the price list
    "LITELLM_MODE": "PRODUCTION",  # litellm looks for no .env file
}


@dataclass(frozen=True, slots=True)
class MiniSweAgent:
    """Settings are those of `harness.args`; unset ones are left to mini-SWE-agent.

    config        its YAML file, relative to the TOML file, or the name of one that it brings (default `mini_textbased`)
    model_class   how it asks the model: `litellm_textbased` (default), `litellm` (tool calls), …
    agent_class   `interactive` (its default) or `default`
    step_limit    most model calls
    cost_limit    most it may spend by its own price list, in which the policy has no price; 0 for no limit
    """

    config: str
    model_class: str = "litellm_textbased"
    agent_class: str | None = None
    step_limit: int | None = None
    cost_limit: float | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        return (_RUN,)

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        # read when it is imported; its own folder, so that nothing of the user's configuration gets in
        return {**_ENVIRONMENT, "MSWEA_GLOBAL_CONFIG_DIR": str(private / "mini-swe-agent"), "HOME": str(private)}

    def program(self, seat: Seat) -> Program:
        specs = [self.config, f"model.model_kwargs.api_base={seat.gateway}/v1"]
        if self.step_limit is not None:
            specs.append(f"agent.step_limit={self.step_limit}")
        if self.cost_limit is not None:
            specs.append(f"agent.cost_limit={self.cost_limit}")
        argv = ["-y", "--exit-immediately", "-m", f"openai/{seat.model}", "--model-class", self.model_class]
        if self.agent_class is not None:
            argv += ["--agent-class", self.agent_class]
        argv += ["-t", str(seat.task["prompt"]), "-o", str(seat.folder / "traj.json")]
        for spec in specs:
            argv += ["-c", spec]
        return Program(function=_RUN, argument=argv, env=_ENVIRONMENT)


def from_config(config: Config) -> MiniSweAgent:
    """The recipe with the settings of `harness.args`. Raises ConfigError for a name or setting that does not exist."""
    harness = config.harness
    if harness.use != NAME:
        raise ConfigError(f"harness.use = {harness.use!r}: there is no such recipe; did you mean {NAME!r}?")
    known = {"config": str, "model_class": str, "agent_class": str, "step_limit": int, "cost_limit": (int, float)}
    args: dict[str, Any] = dict(harness.args)
    for name, value in args.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"harness.args.{name}: unknown; {NAME} takes {', '.join(close or known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ConfigError(f"harness.args.{name} = {value!r} has the wrong type")
    yaml = args.get("config", "mini_textbased")
    local = config.path(yaml)
    if local.is_file():
        args["config"] = str(local)
    elif yaml.endswith(".yaml"):
        raise ConfigError(f"harness.args.config: {local} does not exist")
    else:
        args["config"] = yaml
    return MiniSweAgent(**args)
