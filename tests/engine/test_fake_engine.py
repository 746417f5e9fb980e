import asyncio

import numpy as np
import pytest

from canter.engine.fake import FakeEngine, Fault
from canter.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable
from canter.types import FinishReason, Sampling, VersionSpan, as_ids

PROMPT = as_ids([5, 6, 7])


def slow(count: int, **options) -> FakeEngine:
    """Replies `count` tokens at 5 ms each."""
    return FakeEngine(lambda *_: [9] * count, token_delay_s=0.005, **options)


async def test_replies_depend_on_prompt_and_sampling_alone():
    first, second = FakeEngine(), FakeEngine()
    await second.generate(as_ids([1]), Sampling(), request_id="other")
    a = await first.generate(PROMPT, Sampling(seed=3), request_id="a")
    b = await second.generate(PROMPT, Sampling(seed=3), request_id="b")
    c = await first.generate(PROMPT, Sampling(seed=4), request_id="c")
    assert a.ids.tolist() == b.ids.tolist() != c.ids.tolist()
    assert a.logprobs.tolist() == b.logprobs.tolist()
    assert a.ids[-1] == 2
    assert (a.logprobs <= 0).all()
    assert a.finish_reason is FinishReason.STOP


async def test_script_gets_prompt_sampling_and_number():
    seen = []
    engine = FakeEngine(lambda prompt, sampling, n: seen.append((prompt.tolist(), sampling.seed, n)) or [n])
    for seed in (1, 2):
        await engine.generate(PROMPT, Sampling(seed=seed), request_id=str(seed))
    assert seen == [([5, 6, 7], 1, 0), ([5, 6, 7], 2, 1)]


async def test_text_is_encoded_and_ends_with_the_stop_token():
    engine = FakeEngine(lambda *_: "ab", encode=lambda text: [ord(c) for c in text])
    assert (await engine.generate(PROMPT, Sampling(), request_id="a")).ids.tolist() == [97, 98, 2]
    with pytest.raises(BadRequest, match="encode"):
        await FakeEngine(lambda *_: "ab").generate(PROMPT, Sampling(), request_id="a")


async def test_max_tokens_and_context():
    engine = FakeEngine(lambda *_: [1] * 10, context_tokens=8)
    cut = await engine.generate(PROMPT, Sampling(max_tokens=4), request_id="a")
    assert (len(cut.ids), cut.finish_reason) == (4, FinishReason.LENGTH)
    full = await engine.generate(PROMPT, Sampling(), request_id="a")
    assert (len(full.ids), full.finish_reason) == (5, FinishReason.LENGTH)
    with pytest.raises(ContextOverflow) as caught:
        await engine.generate(as_ids([1] * 8), Sampling(), request_id="b")
    assert (caught.value.prompt_tokens, caught.value.max_tokens) == (8, 8)


async def test_faults_hit_the_numbered_request():
    engine = FakeEngine(
        lambda *_: [1, 2, 3, 4],
        faults={0: Fault.ERROR, 1: Fault.SHORT_LOGPROBS, 2: Fault.NAN, 3: Fault.CUT, 4: Fault.HANG},
    )
    with pytest.raises(EngineError, match="request 0"):
        await engine.generate(PROMPT, Sampling(), request_id="0")
    assert len((await engine.generate(PROMPT, Sampling(), request_id="1")).logprobs) == 3
    assert np.isnan((await engine.generate(PROMPT, Sampling(), request_id="2")).logprobs[-1])
    cut = await engine.generate(PROMPT, Sampling(), request_id="3")
    assert (cut.ids.tolist(), cut.finish_reason) == ([1, 2], FinishReason.ABORT)
    hanging = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="4"))
    await asyncio.sleep(0.01)
    assert not hanging.done()
    await engine.abort("4")
    assert (await hanging).finish_reason is FinishReason.ABORT


async def test_keep_pause_holds_in_place_and_records_both_versions():
    engine = slow(20)
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0.04)
    await engine.pause("keep")
    await asyncio.sleep(0.02)
    assert (await engine.health()).paused
    assert not task.done()
    await engine.load_weights(1)
    await engine.resume()
    generation = await task
    first, second = generation.versions
    assert first == VersionSpan(0, 0, first.end)
    assert second == VersionSpan(1, first.end, 20)
    assert 0 < first.end < 20


async def test_wait_pause_returns_once_all_have_finished_and_holds_new_ones():
    engine = slow(4)
    running = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0.01)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    held = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="b"))
    await asyncio.wait_for(pausing, 2)
    assert running.done()
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 1)
    await engine.resume()
    assert (await held).finish_reason is FinishReason.STOP


async def test_abort_pause_ends_what_runs_with_what_there_is():
    engine = slow(100)
    running = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0.03)
    await asyncio.wait_for(engine.pause("abort"), 2)
    generation = await running
    assert generation.finish_reason is FinishReason.ABORT
    assert 0 < len(generation.ids) == len(generation.logprobs) < 100


async def test_abort_of_unknown_and_held_requests():
    engine = slow(4)
    await engine.abort("nobody")
    await engine.pause()
    held = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0)
    await engine.abort("a")
    generation = await asyncio.wait_for(held, 2)
    assert (len(generation.ids), generation.finish_reason) == (0, FinishReason.ABORT)


async def test_an_id_may_run_once_at_a_time_and_a_closed_engine_refuses():
    engine = slow(4)
    running = asyncio.create_task(engine.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="already running"):
        await engine.generate(PROMPT, Sampling(), request_id="a")
    await engine.close()
    assert (await running).finish_reason is FinishReason.ABORT
    with pytest.raises(EngineUnavailable):
        await engine.generate(PROMPT, Sampling(), request_id="b")
