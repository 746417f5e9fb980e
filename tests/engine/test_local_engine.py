import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from engine_model import dense_logprobs, letters, make_prompt, small_llama
from transformers import MistralConfig, MistralForCausalLM

from canter.engine.http import HttpEngine, serve_engine
from canter.engine.local import LocalEngine
from canter.errors import BadRequest, ConfigError, ContextOverflow, EngineError, EngineUnavailable
from canter.types import FinishReason, Sampling, VersionSpan, as_ids

EXACT = 5e-5
ENDLESS = Sampling(max_tokens=900, seed=1)


def endless_llama(seed: int = 0):
    """Never ends by itself."""
    model = small_llama(seed)
    model.generation_config.eos_token_id = None
    return model


@asynccontextmanager
async def running(model=None, **options) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model or small_llama(), letters, device="cpu", **options)
    try:
        yield engine
    finally:
        await engine.close()


async def start(engine: LocalEngine, name: str = "a", sampling: Sampling = ENDLESS) -> asyncio.Task:
    """A generation that has begun."""
    task = asyncio.create_task(engine.generate(make_prompt(0, 30), sampling, request_id=name))
    async with asyncio.timeout(10):
        while not (await engine.health()).running:  # noqa: ASYNC110  (the protocol has no event for it)
            await asyncio.sleep(0.002)
    return task


async def test_generates_with_dense_logprobs_and_one_span():
    model = small_llama()
    async with running(model, version=4) as engine:
        prompt, sampling = make_prompt(0, 30), Sampling(max_tokens=20, seed=3, temperature=0.8)
        generation = await engine.generate(prompt, sampling, request_id="a")
    assert (generation.ids.dtype, generation.logprobs.dtype) == (np.int32, np.float32)
    assert generation.versions == (VersionSpan(4, 0, len(generation.ids)),)
    np.testing.assert_allclose(generation.logprobs, dense_logprobs(model, prompt, generation.ids, sampling), atol=EXACT)


async def test_the_model_s_own_end_token_stops():
    async with running() as engine:
        calls = [engine.generate(make_prompt(i, 9), Sampling(seed=i), request_id=str(i)) for i in range(12)]
        ends = await asyncio.gather(*calls)
    stopped = [e for e in ends if e.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(e.ids[-1] == 2 and 2 not in e.ids[:-1] for e in stopped)


async def test_without_a_seed_replies_differ():
    async with running() as engine:
        sampling = Sampling(max_tokens=16)
        replies = [await engine.generate(make_prompt(0, 9), sampling, request_id="a") for _ in range(4)]
    assert len({tuple(r.ids.tolist()) for r in replies}) > 1


async def test_bad_requests():
    async with running(context_tokens=64) as engine:
        with pytest.raises(ContextOverflow) as caught:
            await engine.generate(make_prompt(0, 64), Sampling(), request_id="a")
        assert (caught.value.prompt_tokens, caught.value.max_tokens) == (64, 64)
        for bad in ([], [3, 256], [-1]):
            with pytest.raises(BadRequest, match="prompt"):
                await engine.generate(as_ids(bad), Sampling(), request_id="a")
        full = await engine.generate(make_prompt(0, 60), Sampling(), request_id="a")
        assert len(full.ids) <= 4


async def test_an_id_runs_once_at_a_time():
    async with running(endless_llama()) as engine:
        task = await start(engine)
        with pytest.raises(BadRequest, match="already running"):
            await engine.generate(make_prompt(0, 9), Sampling(), request_id="a")
        await engine.abort("a")
        assert (await task).finish_reason is FinishReason.ABORT
        await engine.generate(make_prompt(0, 9), Sampling(max_tokens=1), request_id="a")


async def test_abort_returns_what_there_is():
    model = endless_llama()
    async with running(model) as engine:
        task = await start(engine)
        await engine.abort("nobody")
        await engine.abort("a")
        generation = await asyncio.wait_for(task, 5)
        assert (await engine.health()).running == 0
    assert generation.finish_reason is FinishReason.ABORT
    assert len(generation.ids) == len(generation.logprobs) < 900


async def test_cancelling_frees_the_row():
    async with running(endless_llama()) as engine:
        task = await start(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort("nobody")  # a job behind the one that drops it
        health = await engine.health()
        assert (health.running, health.waiting) == (0, 0)


async def test_keep_pause_holds_still_and_continues_as_if_nothing_had_been():
    async with running(endless_llama()) as engine:
        sampling = Sampling(max_tokens=60, seed=8)
        whole = await engine.generate(make_prompt(0, 30), sampling, request_id="a")
        task = await start(engine, "b", sampling)
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.generate(make_prompt(1, 9), Sampling(max_tokens=2), request_id="c"))
        await asyncio.sleep(0.1)
        assert not task.done()
        health = await engine.health()
        assert (health.paused, health.running, health.waiting) == (True, 1, 1)
        await engine.resume()
        assert (await task).ids.tolist() == whole.ids.tolist()
        await waiting


async def test_keep_pause_across_a_version_gives_two_exact_spans():
    old, new = endless_llama(0), endless_llama(1)
    async with running(endless_llama(0)) as engine:
        sampling = Sampling(max_tokens=400, seed=8)
        task = await start(engine, "a", sampling)
        await engine.pause("keep")
        await asyncio.to_thread(engine.sync, new, 1)
        await engine.resume()
        generation = await task
    first, second = generation.versions
    assert (first.version, second.version, second.end) == (0, 1, 400)
    expected = [dense_logprobs(m, make_prompt(0, 30), generation.ids, sampling) for m in (old, new)]
    np.testing.assert_allclose(generation.logprobs[: first.end], expected[0][: first.end], atol=EXACT)
    np.testing.assert_allclose(generation.logprobs[first.end :], expected[1][first.end :], atol=EXACT)
    assert np.abs(expected[0] - expected[1]).max() > 0.1


async def test_wait_pause_lets_running_ones_finish_and_holds_the_rest():
    async with running(endless_llama(), max_batch=4) as engine:
        tasks = [await start(engine, str(i), Sampling(max_tokens=40, seed=i)) for i in range(6)]
        await asyncio.wait_for(engine.pause("wait"), 10)
        health = await engine.health()
        assert health.running == 0
        assert sum(task.done() for task in tasks) + health.waiting == 6
        await engine.resume()
        assert all(len(g.ids) == 40 for g in await asyncio.gather(*tasks))


async def test_abort_pause_ends_running_ones_at_once():
    async with running(endless_llama()) as engine:
        task = await start(engine)
        await asyncio.wait_for(engine.pause("abort"), 5)
        assert (await asyncio.wait_for(task, 5)).finish_reason is FinishReason.ABORT
        held = asyncio.create_task(engine.generate(make_prompt(1, 9), Sampling(max_tokens=2), request_id="b"))
        await asyncio.sleep(0.05)
        assert not held.done()
        await engine.resume()
        assert len((await held).ids) == 2


async def test_sync_while_sampling_waits_for_the_end_of_a_step():
    new = endless_llama(1)
    async with running(endless_llama(0)) as engine:
        task = await start(engine, "a", Sampling(max_tokens=500, seed=2))
        updates = threading.Thread(target=lambda: [engine.sync(new, version) for version in (1, 2, 3)])
        updates.start()
        generation = await task
        updates.join(5)
    assert [span.version for span in generation.versions][-1] == 3
    assert generation.versions[-1].end == 500


async def test_sync_casts_to_the_engine_s_type():
    new = small_llama(1)
    async with running(small_llama(0), dtype=torch.bfloat16) as engine:
        await asyncio.to_thread(engine.sync, new, 1)
        generation = await engine.generate(make_prompt(0, 30), Sampling(max_tokens=20, seed=1), request_id="a")
    rounded = small_llama(1).to(torch.bfloat16)
    expected = dense_logprobs(rounded, make_prompt(0, 30), generation.ids, Sampling())
    assert np.abs(generation.logprobs - expected).mean() < 0.1
    assert next(new.parameters()).dtype == torch.float32


async def test_load_weights_from_a_folder(tmp_path):
    new = small_llama(1)
    new.save_pretrained(tmp_path)
    async with running(small_llama(0)) as engine:
        await engine.load_weights(1, str(tmp_path))
        generation = await engine.generate(make_prompt(0, 30), Sampling(max_tokens=20, seed=1), request_id="a")
        assert (await engine.health()).version == 1
        await engine.load_weights(1)
        with pytest.raises(BadRequest, match="has version 1, not 2"):
            await engine.load_weights(2)
        with pytest.raises(EngineError, match=r"no \*\.safetensors"):
            await engine.load_weights(2, str(tmp_path / "nothing"))
    np.testing.assert_allclose(
        generation.logprobs, dense_logprobs(new, make_prompt(0, 30), generation.ids, Sampling()), atol=EXACT
    )


async def test_weights_of_another_model_change_nothing():
    async with running(small_llama(0)) as engine:
        for other in (small_llama(1, hidden_size=16), small_llama(1, num_hidden_layers=2)):
            with pytest.raises(EngineError, match="not of this model"):
                await asyncio.to_thread(engine.sync, other, 1)
        generation = await engine.generate(make_prompt(0, 9), Sampling(max_tokens=5, seed=1), request_id="a")
        assert [span.version for span in generation.versions] == [0]


class FailsOnce(torch.nn.Module):
    """A layer that fails the first time, as one that is out of memory does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.failed = False

    def forward(self, *args):
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")
        return self.layer(*args)


async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(caplog):
    model = small_llama()
    model.model.norm = FailsOnce(model.model.norm)
    async with running(model) as engine:
        with pytest.raises(EngineError, match="sampling failed: RuntimeError: out of memory"):
            await engine.generate(make_prompt(0, 9), Sampling(), request_id="a")
        assert len((await engine.generate(make_prompt(0, 9), Sampling(max_tokens=3), request_id="a")).ids) == 3
    assert "gives up" in caplog.text


async def test_close_ends_what_runs_and_refuses_what_comes():
    async with running(endless_llama()) as engine:
        task = await start(engine)
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await task
        with pytest.raises(EngineUnavailable):
            await engine.generate(make_prompt(0, 9), Sampling(), request_id="b")
        with pytest.raises(EngineUnavailable):
            await engine.pause()


def test_models_with_windows_are_refused():
    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sliding window"):
        LocalEngine(MistralForCausalLM(config), letters)


def test_settings_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match=r"raise engine\.cache_tokens"):
        LocalEngine(small_llama(), letters, device="cpu", cache_tokens=1024, context_tokens=512)
    with pytest.raises(ConfigError, match=r"engine\.device"):
        LocalEngine(small_llama(), letters, device="meta")


async def test_over_http_a_reply_is_the_same():
    async with running() as engine:
        url, server = await serve_engine(engine, "key")
        client = HttpEngine(url, "key")
        sampling = Sampling(max_tokens=12, seed=4)
        there = await client.generate(make_prompt(0, 30), sampling, request_id="a")
        here = await engine.generate(make_prompt(0, 30), sampling, request_id="b")
        assert there.ids.tolist() == here.ids.tolist()
        assert there.logprobs.tolist() == here.logprobs.tolist()
        await client.close()
        await server.close()
