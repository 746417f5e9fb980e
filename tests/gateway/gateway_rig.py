"""A whole gateway on loopback for tests: a store, a fake engine, a byte-level tokenizer and a running attempt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from canter.config import Config
from canter.engine.fake import FakeEngine
from canter.gateway.app import App, create_app
from canter.gateway.engines import Engines
from canter.gateway.policy import PolicySource
from canter.gateway.serve import serve
from canter.gateway.stream import Timing
from canter.store import Started, Store
from canter.store.memory import MemoryStore
from canter.tokens.rendering import make_rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.types import EngineRecord, KeyKind, Outcome, Rollout, Task

TEMPLATE = """{%- if tools -%}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{- ('' if loop.first and not m.content else '\n') + '<tool_call>\n{"name": "' + call.function.name -}}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def byte_tokenizer() -> ChatTokenizer:
    """256 bytes, `<|im_start|>`, `<|im_end|>` (the stop token, id 257) and the marks of reasoning and tool calls."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in marks])
    return ChatTokenizer(backend, TEMPLATE, name="bytes", named_tokens={"eos_token": "<|im_end|>"})


TOKENIZER = byte_tokenizer()
STOP_ID = 257


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": "nowhere"},
        "tasks": {"train": "train.jsonl"},
        "harness": {"command": ["true"]},
        "grader": {"use": "exact"},
        "gateway": {"engine_wait_s": 0.3},
        "sampling": {"max_tokens": 256},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return Config(**base)


def fake_engine(script: Any = None, **settings: Any) -> FakeEngine:
    """Replies with text from `script`, by default with `reply N` for request number N."""
    return FakeEngine(
        script or (lambda prompt, sampling, number: f"reply {number}"),
        encode=TOKENIZER.encode_list,
        stop_id=STOP_ID,
        vocab=TOKENIZER.vocab_size,
        **settings,
    )


@dataclass
class Rig:
    """A gateway that runs, and the keys of one rollout's first attempt."""

    url: str
    app: App
    store: Store
    engines: Engines
    engine: FakeEngine
    service_key: str
    admin_key: str
    attempts: dict[str, Started] = field(default_factory=dict)

    @property
    def agent_key(self) -> str:
        return self.attempts["r1"].agent_key

    def sdk(self, **settings: Any) -> openai.AsyncOpenAI:
        """The OpenAI SDK as the harness of rollout r1 would use it; strict about replies, no retries."""
        defaults = {"max_retries": 0, "timeout": 20.0, "_strict_response_validation": True}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.agent_key, **{**defaults, **settings})

    async def start(self, rollout_id: str, *, seed: int = 0, attempt: int = 1) -> Started:
        """A new rollout with its attempt running."""
        await self.store.create_rollouts([rollout(rollout_id, seed=seed)])
        self.attempts[rollout_id] = await self.store.start_attempt(rollout_id, attempt)
        return self.attempts[rollout_id]

    async def grader_key(self, rollout_id: str) -> str:
        """The key for grading the rollout's attempt, whose harness ends with this."""
        await self.store.end_attempt(rollout_id, 1, Outcome.EXITED, exit_code=0)
        return await self.store.grader_key(rollout_id, 1)

    async def chat(self, content: str = "hi", *, key: str | None = None, **fields: Any) -> tuple[int, Any]:
        """Status and JSON of one chat completion."""
        body = {"model": "policy", "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body, key=key)

    async def post(self, path: str, body: Any, *, key: str | None = None, method: str = "POST") -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key or self.agent_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, json=body, headers=headers) as response,
        ):
            return response.status, await response.json(content_type=None)


def rollout(rollout_id: str, *, seed: int = 0) -> Rollout:
    return Rollout(rollout_id, "g", Task("t", "Say hi.", hidden={"answer": "hi"}), seed=seed)


@contextlib.asynccontextmanager
async def gateway(
    engine: FakeEngine | None = None,
    *,
    store: Store | None = None,
    timing: Timing | None = None,
    settings: Config | None = None,
    register: bool = True,
    start: bool = True,
    memory_bytes: int = 2**28,
) -> AsyncIterator[Rig]:
    """A gateway with rollout r1 running. A `store` that has r1 already is taken as it is."""
    engine = engine or fake_engine()
    store = store or MemoryStore()
    settings = settings or config()
    engines = Engines(lambda url, key: engine)
    source = PolicySource(settings, make_rendering(TOKENIZER, "template"), TOKENIZER, engines)
    if register:
        await engines.register(EngineRecord("http://engine", "fake", 0), "k")
    app = create_app(settings, store, source, timing=timing or Timing(body_s=1.0), memory_bytes=memory_bytes)
    keys = [await store.issue_key(KeyKind.SERVICE), await store.issue_key(KeyKind.ADMIN)]
    async with serve(app, settings.gateway, grace_s=0.5) as url:
        rig = Rig(url, app, store, engines, engine, *keys)
        if not await store.rollouts() and start:
            await rig.start("r1")
        yield rig
