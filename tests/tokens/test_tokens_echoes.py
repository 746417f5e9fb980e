"""What harnesses make of a turn before they send it back, and which call the next request then belongs to.

Where nothing that matters was changed the turn keeps the tokens that were sampled; where something was, the history is
what the harness sent, and the call forks with its cause.
"""

from dataclasses import replace

import numpy as np
import pytest
from token_worlds import BASH, CHATML, THINKING, Harness, byte_tokenizer, check_plan, same_plan, sampled_text

from canter.tokens.messages import Message, ToolCall, arrange
from canter.tokens.template import TemplateRendering
from canter.tokens.tree import Plan, Tree
from canter.types import ForkCause

SYSTEM, USER = Message("system", "Work on it."), Message("user", "Hi")
TWO = (
    "<think>\nWhich ones?\n</think>\n\n  Looking.  \n"
    '<tool_call>\n{"name": "bash", "arguments": { "command":  "cd /work && ls  " }}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command":"caf\\u00e9 \\/"}}\n</tool_call>'
)


class Talk(Harness):
    """One conversation, whose model says what it is told."""

    def __init__(self, template: str = THINKING) -> None:
        rendering = TemplateRendering(byte_tokenizer(template))
        super().__init__(rendering, Tree(rendering))
        self.tokenizer = rendering.tokenizer

    def say(self, messages: list[Message], text: str, tools=(BASH,), **kind) -> tuple[Plan, Message]:
        plan = self.plan(messages, tools, **kind)
        check_plan(self, plan)
        ids = sampled_text(self.tokenizer, text, stop=self.tokenizer.eos_token_id)
        return plan, self.finish(plan, messages, tools, ids)

    def next(self, messages: list[Message], tools=(BASH,), **kind) -> Plan:
        plan = self.plan(messages, tools, **kind)
        check_plan(self, plan)
        return plan


def results(reply: Message) -> list[Message]:
    return [Message("tool", f"result {i}", tool_call_id=call.id) for i, call in enumerate(reply.tool_calls)]


def rewritten(reply: Message, *arguments: str) -> Message:
    calls = tuple(replace(c, arguments=a) for c, a in zip(reply.tool_calls, arguments, strict=True))
    return replace(reply, tool_calls=calls)


SAME_TURN = {
    "verbatim": lambda r: r,
    "without its reasoning": lambda r: replace(r, reasoning=None),
    "with reasoning trimmed": lambda r: replace(r, reasoning=r.reasoning.strip()),
    "trimmed": lambda r: replace(r, content=r.content.strip()),
    "with blanks added": lambda r: replace(r, content=f"\n{r.content}\n"),
    "arguments written again": lambda r: rewritten(r, '{"command":"cd /work && ls  "}', '{"command": "café /"}'),
    "a default added": lambda r: rewritten(r, '{"command":"cd /work && ls  ","timeout":null}', '{"command":"café /"}'),
    "the cd taken out": lambda r: rewritten(r, '{"command":"ls  "}', '{"command":"café /"}'),
    "arguments trimmed": lambda r: rewritten(r, '{"command":"ls"}', '{"command":"café /"}'),
    "arguments quoted": lambda r: rewritten(
        r, '{"__unparsedToolInput":{"raw":"{ \\"command\\":","len":36}}', '{"command":"café /"}'
    ),
    "with a name": lambda r: replace(r, name="agent"),
}
ANOTHER_TURN = {
    "the tool renamed": (
        lambda r: replace(r, tool_calls=(replace(r.tool_calls[0], name="invalid"), r.tool_calls[1])),
        ForkCause.TOOL_ARGUMENTS,
    ),
    "the arguments replaced": (
        lambda r: rewritten(r, '{"_openhands_malformed_tool_call":true}', r.tool_calls[1].arguments),
        ForkCause.TOOL_ARGUMENTS,
    ),
    "the arguments repaired": (
        lambda r: rewritten(r, '{"command":"ls -l"}', r.tool_calls[1].arguments),
        ForkCause.TOOL_ARGUMENTS,
    ),
    "cut behind the first call": (lambda r: replace(r, tool_calls=r.tool_calls[:1]), ForkCause.TRUNCATED),
    "cut behind the text": (lambda r: replace(r, tool_calls=()), ForkCause.TRUNCATED),
    "cut in the text": (lambda r: replace(r, content="Loo", tool_calls=()), ForkCause.TRUNCATED),
    "cut behind the reasoning": (lambda r: replace(r, content="", tool_calls=()), ForkCause.TRUNCATED),
    "its text moved away": (lambda r: replace(r, content=""), ForkCause.EDITED_HISTORY),
    "its text rewritten": (lambda r: replace(r, content="Searching."), ForkCause.EDITED_HISTORY),
    "replaced by a note": (
        lambda r: Message("assistant", "[Tool use interrupted]"),
        ForkCause.EDITED_HISTORY,
    ),
    "told again as text": (
        lambda r: Message("assistant", f"Looking.\nCalling tools:\n[{{'id': '{r.tool_calls[0].id}'}}]"),
        ForkCause.EDITED_HISTORY,
    ),
}


@pytest.mark.parametrize("change", SAME_TURN.values(), ids=SAME_TURN)
def test_a_turn_that_says_the_same_keeps_its_sampled_tokens(change):
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    chat = [SYSTEM, USER, change(reply), *results(reply)]
    plan = talk.next(chat)
    assert (plan.fork, plan.parent_id, plan.proposed_parent_id) == (None, "c0", "c0")
    np.testing.assert_array_equal(plan.prompt[: plan.prefix_len], talk.whole("c0"))
    _, more = talk.say(chat, "Done.")
    later = talk.next([*chat, more, Message("user", "Now?")])
    assert later.proposed_parent_id == "c1"
    assert TWO in talk.tokenizer.decode(talk.whole("c1"))


@pytest.mark.parametrize(("change", "cause"), ANOTHER_TURN.values(), ids=ANOTHER_TURN)
def test_a_turn_that_says_something_else_is_what_the_harness_sent_and_forks(change, cause):
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    told = change(reply)
    chat = [SYSTEM, USER, told, *(results(told) or [Message("user", "Go on.")])]
    plan, more = talk.say(chat, "Done.")
    assert (plan.fork, plan.proposed_parent_id) == (cause, "c0")
    np.testing.assert_array_equal(plan.prompt, talk.rendering.full(chat, [BASH]))
    follow = talk.next([*chat, more, Message("tool", "x", tool_call_id="1")])
    assert (follow.fork, follow.parent_id) == (None, "c1")


def test_results_in_the_order_in_which_they_came_are_the_same_turn():
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    first, second = results(reply)
    _, more = talk.say([SYSTEM, USER, reply, *arrange([reply, second, first])[1:]], TWO)
    chat = arrange([SYSTEM, USER, reply, first, second, more, *reversed(results(more))])
    plan = talk.next(list(chat))
    assert (plan.fork, plan.parent_id) == (None, "c1")


def test_calls_with_other_ids_are_found_by_what_they_say_and_where():
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    calls = tuple(replace(c, id=f"call_{i}") for i, c in enumerate(reply.tool_calls))
    told = replace(reply, content="Looking.", reasoning=None, tool_calls=calls)
    plan = talk.next([SYSTEM, USER, told, *results(told)])
    assert (plan.fork, plan.parent_id) == (None, "c0")
    other = replace(told, tool_calls=(calls[0], ToolCall("call_1", "bash", '{"command": "rm"}')))
    plan = talk.next([SYSTEM, USER, other, *results(other)])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.TOOL_ARGUMENTS, "c0")


def test_messages_that_the_harness_invents_are_part_of_the_prompt():
    talk = Talk()
    chat = [SYSTEM, Message("user", "Context."), Message("assistant", "Got it. Thanks for the context!"), USER]
    for _ in range(3):
        plan, reply = talk.say(chat, TWO)
        assert plan.fork is None
        chat = [*chat, reply, *results(reply), Message("system", "2 messages left."), Message("assistant", "Hm.")]


def test_a_reply_that_came_back_in_another_place_is_a_dropped_turn():
    talk = Talk()
    partial, resume = Message("assistant", "Loo"), Message("user", "The connection dropped. Resume directly.")
    _, reply = talk.say([SYSTEM, USER, partial, resume], TWO)
    plan = talk.next([SYSTEM, USER, reply, *results(reply)])  # the partial text and the request to resume are gone
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.DROPPED_TURN, "c0")


def test_text_that_a_cut_stream_left_behind_the_result_forks_once():
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    chat = [SYSTEM, USER, replace(reply, content=""), *results(reply), Message("assistant", "Looking.")]
    plan, more = talk.say(chat, TWO)
    assert plan.fork is ForkCause.EDITED_HISTORY
    plan = talk.next([*chat, more, *results(more)])
    assert (plan.fork, plan.parent_id) == (None, "c1")


def test_turns_put_together_after_a_summary_are_a_compaction():
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], "The first answer.")
    chat = [SYSTEM, USER, reply, Message("user", "Go on.")]
    summary = "Everything that was done so far, in a few words."
    _, _ = talk.say([*chat, Message("user", "Summarise.")], summary, (), label="summary", hint=ForkCause.COMPACTION)
    rebuilt = [SYSTEM, Message("user", f"<state>{summary}</state>"), Message("assistant", "Got it.\nThe first answer.")]
    assert talk.next([*rebuilt, USER]).fork is ForkCause.COMPACTION


# -- side requests and sub-agents --


@pytest.mark.parametrize("tools", [(), (BASH,)])
def test_the_agent_is_no_fork_of_a_side_request_that_came_before_it(tools):
    talk = Talk()
    talk.say([SYSTEM, Message("user", "Title for: Hi")], "Hi", tools, label="title", hint=ForkCause.SIDE_REQUEST)
    plan, reply = talk.say([SYSTEM, USER], "Yes.", tools)
    assert (plan.fork, plan.proposed_parent_id) == (None, None)
    plan = talk.next([SYSTEM, USER, reply, Message("user", "And?")], tools)
    assert (plan.fork, plan.parent_id) == (None, "c1")


def test_a_side_request_with_the_agents_whole_history_leaves_its_chain_alone():
    talk = Talk()
    _, reply = talk.say([SYSTEM, USER], TWO)
    chat = [SYSTEM, USER, reply, *results(reply)]
    memory = [Message("system", "You keep memories."), *chat[1:], Message("user", "What is worth keeping?")]
    plan, kept = talk.say(memory, TWO, label="memory", hint=ForkCause.SIDE_REQUEST)
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.SIDE_REQUEST, "c0")
    plan = talk.next([*memory, kept, *results(kept)], label="memory", hint=ForkCause.SIDE_REQUEST)
    assert (plan.fork, plan.parent_id) == (None, "c1")
    plan = talk.next(chat)
    assert (plan.fork, plan.parent_id) == (None, "c0")


def test_a_summary_with_the_agents_tools_goes_on_from_it_and_the_agent_goes_on_from_its_own_turn():
    talk = Talk(CHATML)
    _, reply = talk.say([SYSTEM, USER], "One.")
    chat = [SYSTEM, USER, reply, Message("user", "Two?")]
    kind = {"label": "summary", "hint": ForkCause.COMPACTION}
    plan, _ = talk.say([*chat[:3], Message("user", "Summarise.")], "Two.", **kind)
    assert (plan.fork, plan.parent_id) == (None, "c0")
    plan, more = talk.say(chat, "Two.")
    assert (plan.fork, plan.parent_id) == (None, "c0")
    plan = talk.next([*chat, more, Message("user", "Three?")])
    assert (plan.fork, plan.parent_id) == (None, "c2")


def test_of_equal_replies_the_one_of_the_same_kind_goes_on():
    talk = Talk(CHATML)
    for label in ("main", "side", "main", "side"):
        talk.say([USER], "Yes.", (), label=label)
    follow = [USER, Message("assistant", "Yes."), USER]
    assert talk.next(follow, ()).parent_id == "c2"
    assert talk.next(follow, (), label="side").parent_id == "c3"


def test_a_history_that_holds_the_reply_to_a_side_request_was_compacted():
    talk = Talk()
    talk.say([SYSTEM, USER], TWO)
    asked = [Message("system", "Summarise."), Message("user", "…")]
    talk.say(asked, "Short.", (), label="side", hint=ForkCause.SIDE_REQUEST)
    rebuilt = [
        SYSTEM,
        Message("user", "What did we do so far?"),
        Message("assistant", "Short."),
        Message("user", "On."),
    ]
    plan, reply = talk.say(rebuilt, TWO)
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.COMPACTION, "c0")
    plan = talk.next([*rebuilt, reply, *results(reply)])
    assert (plan.fork, plan.parent_id) == (None, "c2")


def test_a_report_in_a_tool_result_is_no_compaction():
    talk = Talk()
    report = "The sub-agent found the bug in line 7 of the parser."
    talk.say([SYSTEM, Message("user", "Find it.")], report, label="subagent", hint=ForkCause.SUBAGENT)
    _, reply = talk.say([SYSTEM, USER], TWO)
    told = [Message("tool", report, tool_call_id=c.id) for c in reply.tool_calls]
    plan = talk.next([SYSTEM, Message("user", "Edited."), reply, *told])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.EDITED_HISTORY, "c1")


def test_a_hint_says_nothing_about_a_conversation_of_its_own_kind():
    talk = Talk()
    talk.say([SYSTEM, USER], TWO)
    kind = {"label": "subagent", "hint": ForkCause.SUBAGENT}
    plan, reply = talk.say([SYSTEM, Message("user", "Sub.")], TWO, **kind)
    assert plan.fork is ForkCause.SUBAGENT
    plan = talk.next([SYSTEM, Message("user", "Sub, edited."), reply, *results(reply)], **kind)
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.EDITED_HISTORY, "c1")


def test_a_restored_tree_knows_the_kinds():
    talk = Talk(CHATML)
    for label in ("main", "title", "summary"):
        talk.say([USER], "Yes.", (), label=label, hint=ForkCause.SIDE_REQUEST)
    restored = Tree(talk.rendering)
    restored.restore(talk.rows)
    follow = [USER, Message("assistant", "Yes."), USER]
    for label in ("main", "title", "summary"):
        same_plan(restored.plan(follow, (), label=label), talk.plan(follow, (), label=label))
    assert restored.plan(follow, ()).parent_id == "c0"
