"""Two thousand broken requests for each path: each gets a clear answer, none an error of ours, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fuzz_rig import at_rest, break_off, send_all
from gateway_rig import Rig, gateway
from mutants import SEEDS, mutant

from canter.gateway.stream import Timing
from canter.store.sqlite import open_sqlite
from canter.types import CallStatus

MUTANTS = 2000
TIMING = Timing(body_s=2.0)
BASES = {
    "/v1/chat/completions": SEEDS["/v1/chat/completions"],
    "/v1/completions": [
        {"model": "policy", "prompt": "Once upon a time"},
        {"model": "policy", "prompt": [72, 105, 33], "max_tokens": 7, "logprobs": 1, "stop": ["."]},
        {"model": "policy", "prompt": ["One text"], "stream": True, "stream_options": {"include_usage": True}},
        {"model": "policy", "prompt": [[1, 2, 3]], "temperature": 0.5, "top_p": 1, "seed": 3, "n": 1, "echo": False},
    ],
    "/v1/responses": SEEDS["/v1/responses"],
    "/v1/responses/input_tokens": SEEDS["/v1/responses"],
    "/v1/messages": SEEDS["/v1/messages"],
    "/v1/messages/count_tokens": SEEDS["/v1/messages"],
}


@asynccontextmanager
async def durable_gateway(folder: Path) -> AsyncIterator[Rig]:
    store = open_sqlite(folder / "store.db")
    try:
        async with gateway(store=store, timing=TIMING) as rig:
            yield rig
    finally:
        await store.close()


@pytest.mark.parametrize("path", BASES)
async def test_mutants_get_clear_answers(path: str, tmp_path: Path) -> None:
    count = MUTANTS if not path.endswith("_tokens") else MUTANTS // 4
    async with durable_gateway(tmp_path) as rig:
        keys = [rig.agent_key] + [(await rig.start(f"r{number}")).agent_key for number in range(2, 9)]
        seen = await send_all(rig, (mutant(path, number, BASES[path]) for number in range(count)), keys)
        await at_rest(rig)
    assert not seen.wrong, f"{len(seen.wrong)} of {count}, the first:\n" + "\n".join(seen.wrong[:5])
    assert sum(seen.statuses.values()) == count
    assert seen.statuses[200] > count / 10, "most of a request may be broken and it is still one"
    assert seen.statuses[400] > count / 10


@pytest.mark.parametrize("path", [path for path in BASES if not path.endswith("_tokens")])
async def test_clients_that_break_off_leave_nothing_behind(path: str) -> None:
    async with gateway(timing=TIMING) as rig:
        limit = asyncio.Semaphore(16)

        async def one(number: int) -> None:
            async with limit:
                await break_off(rig, mutant(path, number, BASES[path]), rig.agent_key)

        await asyncio.gather(*(one(number) for number in range(300)))
        await at_rest(rig)
        statuses = {call.status for call in await rig.store.calls(["r1"])}
    assert statuses <= {CallStatus.OK, CallStatus.CANCELLED}
