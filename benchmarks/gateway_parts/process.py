"""The gateway under measurement, in a process of its own.

    python benchmarks/gateway_parts/process.py relay|passthrough|tokens FOLDER UPSTREAM ROLLOUTS

`relay` is the floor: the same HTTP server and client with nothing in between, no keys, no recording. Prints one JSON
line, `{"url", "keys"}`, and serves until it is told to end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop
from yarl import URL

from canter.config import Config
from canter.engine.fake import FakeEngine
from canter.engine.openai import OpenAIEngine
from canter.engine.origin import Origin
from canter.gateway.app import create_app
from canter.gateway.engines import Engines
from canter.gateway.http import Receive, Reply, Request, Scope, Send
from canter.gateway.passthrough import UpstreamSource
from canter.gateway.policy import PolicySource
from canter.gateway.serve import serve
from canter.gateway.source import Source
from canter.store import open_store
from canter.tokens.rendering import make_rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.types import EngineRecord, Rollout, Task

MODEL = "policy"
START_TOKENS = 30_000
TURN_TOKENS = 300
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def words_tokenizer() -> ChatTokenizer:
    """A byte-level BPE in which `word` with its space is one token: texts are as long as they are in practice."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["word word word user assistant system"] * 10, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return ChatTokenizer(backend, CHATML, name="words", named_tokens={"eos_token": "<|im_end|>"})


def settings(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "name": MODEL},
            "tasks": {"train": "none.jsonl"},
            "harness": {"command": ["true"]},
            "grader": {"use": "exact"},
        }
    )


async def make_source(mode: str, config: Config, upstream: str) -> Source:
    if mode == "passthrough":
        return UpstreamSource(config, OpenAIEngine(upstream, model="fake-model", version=0))
    tokenizer = words_tokenizer()
    reply = tokenizer.encode_list("word " * (TURN_TOKENS // 2 - 6))
    stop = tokenizer.stop_token_ids[0]
    engine = FakeEngine(lambda prompt, sampling, number: [*reply, stop], context_tokens=10**6, stop_id=stop)
    engines = Engines(lambda url, key: engine)
    await engines.register(EngineRecord("http://fake", MODEL, 0), "")
    return PolicySource(config, make_rendering(tokenizer, "template"), tokenizer, engines)


class Relay:
    """An ASGI app that sends a request's bytes on and its reply's bytes back."""

    def __init__(self, upstream: str) -> None:
        url = URL(upstream + "/chat/completions")
        self._path = url.raw_path
        self._origin = Origin(url, {"content-type": "application/json"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        body = await request.body(limit=2**30, deadline_s=60)
        response = await self._origin.post(self._path, body, timeout_s=60)
        await request.reply(Reply(response.status, response.body))

    async def close(self) -> None:
        self._origin.close()


async def main() -> None:
    mode, folder, upstream, rollouts = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    config = settings(folder)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if mode == "relay":
        async with serve(Relay(upstream), config.gateway, grace_s=1) as url:
            print(json.dumps({"url": url, "keys": ["none"]}), flush=True)
            await stop.wait()
        return
    store = open_store(folder / "canter.db")
    source = await make_source(mode, config, upstream)
    ids = [f"r{i}" for i in range(rollouts)]
    await store.create_rollouts([Rollout(id, "g", Task("t", "none")) for id in ids])
    keys = [(await store.start_attempt(id, 1)).agent_key for id in ids]
    async with serve(create_app(config, store, source), config.gateway, grace_s=1) as url:
        print(json.dumps({"url": url, "keys": keys}), flush=True)
        await stop.wait()
    await source.close()
    await store.close()


if __name__ == "__main__":
    uvloop.run(main())
