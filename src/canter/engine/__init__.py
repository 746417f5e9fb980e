"""What runs the policy: token ids in, token ids with logprobs and versions out.

`Engine` is the protocol. `local` samples with torch in the trainer's process, `http` serves any engine over HTTP and
is its client, `openai` passes through to an OpenAI-compatible server, `fake` is scripted and for protocol tests only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from canter.types import Generation, Ids, Sampling

PauseMode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True)
class Health:
    """`context_tokens` is the longest prompt plus reply; `running` and `waiting` count requests."""

    model: str
    version: int
    context_tokens: int
    paused: bool = False
    running: int = 0
    waiting: int = 0


class Engine(Protocol):
    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        """Samples one reply. Deterministic in (weights, prompt, sampling) where `sampling.seed` is set, whatever else
        runs at the same time. Logprobs are those of the distribution that was sampled from (temperature applied).

        Raises `EngineError` (a retry may help), `ContextOverflow`, `BadRequest`. Cancelling the task aborts.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a generation; its `generate` returns what there is, finish reason `abort`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling: `keep` holds running generations in place, `wait` lets them finish, `abort` ends them."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, version: int, path: str | None = None) -> None:
        """Switches to policy `version` (from `path`, or from the trainer's weights in the same process)."""
        ...

    async def health(self) -> Health: ...

    async def close(self) -> None: ...
