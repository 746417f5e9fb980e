import dataclasses

import numpy as np
import pytest
from token_worlds import BASH, THINKING, Harness, byte_tokenizer, check_plan, respelled, same_plan, sampled_text

from canter.errors import NotFound
from canter.tokens.messages import Message, ToolCall, ToolSpec
from canter.tokens.template import TemplateRendering
from canter.tokens.tree import Plan, Tree
from canter.types import ForkCause, Ids

SYSTEM, USER = Message("system", "Work on it."), Message("user", "Hi")
SUMMARY = "So far the files were listed and the bug was found in line 7."


class Session(Harness):
    """A harness whose model is asked to say a given text."""

    def __init__(self, template: str = THINKING, **options: int) -> None:
        rendering = TemplateRendering(byte_tokenizer(template))
        super().__init__(rendering, Tree(rendering, **options))
        self.stop = rendering.tokenizer.eos_token_id
        self.encode = rendering.tokenizer

    def said(self, text: str, *, cut: bool = False) -> Ids:
        return sampled_text(self.encode, text, stop=None if cut else self.stop)

    def turn(
        self, messages: list[Message], text: str, tools: tuple[ToolSpec, ...] = (BASH,), *, cut: bool = False
    ) -> tuple[Plan, Message]:
        plan = self.plan(messages, tools)
        check_plan(self, plan)
        return plan, self.finish(plan, messages, tools, self.said(text, cut=cut))


def called(text: str = "", command: str = "ls") -> str:
    return f'{text}<tool_call>\n{{"name": "bash", "arguments": {{ "command":  "{command}" }}}}\n</tool_call>'


def result(reply: Message, content: str = "a.txt") -> list[Message]:
    return [Message("tool", content, tool_call_id=c.id) for c in reply.tool_calls]


@pytest.fixture
def session() -> Session:
    return Session()


def test_the_first_call_has_no_parent_and_no_fork(session):
    plan, _ = session.turn([SYSTEM, USER], "Hello.")
    assert (plan.parent_id, plan.prefix_len, plan.fork, plan.proposed_parent_id, plan.fork_at) == (
        None,
        0,
        None,
        None,
        None,
    )
    np.testing.assert_array_equal(plan.prompt, session.rendering.full([SYSTEM, USER], [BASH]))


def test_respelled_and_trimmed_replies_without_their_reasoning_go_on_from_the_sampled_tokens(session):
    chat = [SYSTEM, USER]
    for n in range(5):
        plan, reply = session.turn(chat, called(f"<think>\nhm {n}\n</think>\n\nLook {n}.  \n", f"echo {n}"))
        assert (plan.fork, plan.parent_id) == (None, f"c{n - 1}" if n else None)
        assert reply.reasoning == f"hm {n}"
        chat = [*chat, respelled(reply), *result(reply)]
    text = session.encode.decode(session.plan(chat, [BASH]).prompt)
    assert text.count('{ "command":  "echo') == 5
    assert text.count("<think>") == 5


def test_added_defaults_and_a_removed_cd_are_the_same_turn(session):
    _, reply = session.turn([SYSTEM, USER], called("", "cd /work && make"))
    echo = ToolCall(reply.tool_calls[0].id, "bash", '{"command": "make", "timeout": null}')
    chat = [SYSTEM, USER, dataclasses.replace(reply, tool_calls=(echo,)), *result(reply)]
    assert session.plan(chat, [BASH]).fork is None


def test_a_resampled_prompt_is_a_sibling(session):
    _, reply = session.turn([SYSTEM, USER], called())
    again, _ = session.turn([SYSTEM, USER], "Other.")
    assert (again.parent_id, again.fork) == (None, None)
    chat = [SYSTEM, USER, reply, *result(reply)]
    first, _ = session.turn(chat, "One.")
    second, _ = session.turn(chat, "Two.")
    assert first.parent_id == second.parent_id == "c0"
    np.testing.assert_array_equal(first.prompt, second.prompt)
    for text, parent in (("One.", "c2"), ("Two.", "c3")):
        plan = session.plan([*chat, Message("assistant", text), USER], [BASH])
        assert (plan.parent_id, plan.fork) == (parent, None)


def test_of_equal_replies_the_one_with_the_echoed_reasoning_goes_on_else_the_latest():
    session = Session()
    session.turn([USER], "<think>\na\n</think>\n\nYes.")
    session.turn([USER], "<think>\nb\n</think>\n\nYes.")
    follow = Message("tool", "x", tool_call_id="1")
    assert session.plan([USER, Message("assistant", "Yes.", "a"), follow], [BASH]).parent_id == "c0"
    assert session.plan([USER, Message("assistant", "Yes."), follow], [BASH]).parent_id == "c1"


def test_of_equal_replies_it_is_the_chosen_ones_reasoning_that_must_not_be_lost(session):
    session.turn([USER], "Yes.")
    session.turn([USER], "<think>\nb\n</think>\n\nYes.")
    plan = session.plan([USER, Message("assistant", "Yes."), Message("user", "So?")], [BASH])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.DROPPED_REASONING, "c1")


def test_a_dropped_turn_forks_from_the_call_that_was_dropped(session):
    session.turn([SYSTEM, USER], "no call")
    plan, reply = session.turn([SYSTEM, USER, Message("user", "Call a tool.")], called())
    assert (plan.fork, plan.proposed_parent_id, plan.parent_id) == (ForkCause.DROPPED_TURN, "c0", "c0")
    assert 0 < plan.prefix_len == plan.fork_at < len(session.whole("c0"))
    chat = [SYSTEM, USER, Message("user", "Call a tool."), reply, *result(reply)]
    session.turn(chat, "bad")
    later, _ = session.turn([*chat, Message("user", "Call!")], "ok")
    assert (later.fork, later.proposed_parent_id) == (ForkCause.DROPPED_TURN, "c2")
    assert (later.parent_id, later.prefix_len) == ("c1", len(session.whole("c1")))  # still extends what came before


def test_a_turn_dropped_from_the_middle_is_named(session):
    _, first = session.turn([SYSTEM, USER], called("", "one"))
    chat = [SYSTEM, USER, first, *result(first)]
    _, second = session.turn(chat, called("", "two"))
    plan = session.plan([SYSTEM, USER, second, *result(second)], [BASH])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.DROPPED_TURN, "c1")


def test_changed_arguments_fork(session):
    _, reply = session.turn([SYSTEM, USER], called())
    other = ToolCall(reply.tool_calls[0].id, "invalid", '{"error": "no such tool"}')
    plan = session.plan([SYSTEM, USER, dataclasses.replace(reply, tool_calls=(other,)), *result(reply)], [BASH])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.TOOL_ARGUMENTS, "c0")
    assert "invalid" in session.encode.decode(plan.prompt)


def test_a_changed_turn_that_comes_back_is_found_again(session):
    _, reply = session.turn([SYSTEM, USER], called())
    other = ToolCall(reply.tool_calls[0].id, "bash", '{"command": "rm"}')
    chat = [SYSTEM, USER, dataclasses.replace(reply, tool_calls=(other,)), *result(reply)]
    forked, more = session.turn(chat, "Done.")
    plan = session.plan([*chat, more, Message("user", "Really?")], [BASH])
    assert forked.fork is ForkCause.TOOL_ARGUMENTS
    assert (plan.fork, plan.parent_id) == (None, "c1")
    original = session.plan([SYSTEM, USER, reply, *result(reply)], [BASH])
    assert (original.fork, original.parent_id) == (None, "c0")


def test_an_edited_user_message_forks(session):
    _, reply = session.turn([SYSTEM, USER], called())
    edited = dataclasses.replace(USER, content="Hi there")
    plan = session.plan([SYSTEM, edited, reply, *result(reply)], [BASH])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.EDITED_HISTORY, "c0")
    assert session.plan([SYSTEM, edited], [BASH]).fork is ForkCause.EDITED_HISTORY


def test_an_edited_reply_and_a_partial_one_are_told_apart(session):
    session.turn([SYSTEM, USER], "A long answer.")
    for content, cause in (("A long", ForkCause.TRUNCATED), ("No answer.", ForkCause.EDITED_HISTORY)):
        plan = session.plan([SYSTEM, USER, Message("assistant", content), USER], [BASH])
        assert (plan.fork, plan.proposed_parent_id) == (cause, "c0")


def test_other_system_or_tools_without_a_shared_turn_are_subagents_or_side_requests(session):
    session.turn([SYSTEM, USER], called())
    asked = [Message("system", "You write titles."), USER]
    assert session.plan(asked, []).fork is ForkCause.SIDE_REQUEST
    assert session.plan(asked, [BASH]).fork is ForkCause.SUBAGENT
    assert session.tree.plan(asked, [BASH], hint=ForkCause.SIDE_REQUEST).fork is ForkCause.SIDE_REQUEST
    assert session.tree.plan([SYSTEM, USER], [BASH], hint=ForkCause.SUBAGENT).fork is None


def test_a_conversation_with_tools_is_no_fork_of_the_title_that_was_asked_for_before_it(session):
    session.turn([Message("system", "You write titles."), USER], "A title", ())
    plan, _ = session.turn([SYSTEM, USER], called())
    assert (plan.fork, plan.parent_id) == (None, None)


def test_interleaved_subagents_each_keep_their_own_chain(session):
    chats = {"a": [SYSTEM, USER], "b": [Message("system", "Search."), USER]}
    parents: dict[str, str | None] = {"a": None, "b": None}
    for n in range(6):
        agent = "ab"[n % 2]
        plan, reply = session.turn(chats[agent], called("", f"{agent}{n}"))
        if n >= 2:
            assert (plan.fork, plan.parent_id) == (None, parents[agent])
        parents[agent] = f"c{n}"
        chats[agent] = [*chats[agent], respelled(reply), *result(reply)]


def test_a_second_subagent_of_the_same_kind_is_no_edit_of_the_first(session):
    session.turn([SYSTEM, USER], called())
    search = Message("system", "Search.")
    _, reply = session.turn([search, Message("user", "Find a.")], called())
    session.turn([search, Message("user", "Find a."), reply, *result(reply)], "a is here")
    assert session.plan([search, Message("user", "Find b.")], [BASH]).fork is ForkCause.SUBAGENT


def test_a_history_that_begins_with_a_summary_is_a_compaction(session):
    _, reply = session.turn([SYSTEM, USER], called())
    chat = [SYSTEM, USER, reply, *result(reply)]
    asked, _ = session.turn([*chat, Message("user", "Summarise.")], SUMMARY, ())
    assert asked.fork is ForkCause.SIDE_REQUEST
    plan = session.plan([SYSTEM, Message("user", f"Earlier: {SUMMARY}\nGo on.")], [BASH])
    assert plan.fork is ForkCause.COMPACTION
    summed = [SYSTEM, Message("user", "What did we do?"), Message("assistant", SUMMARY), Message("user", "Go on.")]
    assert session.plan(summed, [BASH]).fork is ForkCause.COMPACTION
    kept = session.plan([SYSTEM, Message("user", "(shortened)"), reply, *result(reply)], [BASH])
    assert kept.fork is ForkCause.EDITED_HISTORY


def test_other_tools_on_the_same_history_change_the_template(session):
    _, reply = session.turn([SYSTEM, USER], called())
    other = ToolSpec("sh", "Another shell.", {})
    assert session.plan([SYSTEM, USER, reply, *result(reply)], [BASH, other]).fork is ForkCause.TEMPLATE


def test_reasoning_that_the_template_drops_is_named():
    session = Session()
    _, reply = session.turn([SYSTEM, USER], "<think>\nhm\n</think>\n\nYes.")
    plan = session.plan([SYSTEM, USER, reply, USER], [BASH])
    assert (plan.fork, plan.proposed_parent_id) == (ForkCause.DROPPED_REASONING, "c0")
    np.testing.assert_array_equal(plan.prompt, session.rendering.full([SYSTEM, USER, reply, USER], [BASH]))


def test_a_cut_reply_is_closed_and_goes_on(session):
    _, reply = session.turn([SYSTEM, USER], "Half an ans", cut=True)
    chat = [SYSTEM, USER, reply, Message("user", "Resume.")]
    plan = session.plan(chat, [BASH])
    assert (plan.fork, plan.parent_id) == (None, "c0")
    assert session.encode.decode(plan.suffix).startswith("<|im_end|>\n<|im_start|>user\nResume.")


def test_a_reply_whose_tokens_stop_otherwise_than_the_template_is_a_fork_by_tokenisation():
    session = Session()
    session.encode.stop_token_ids = (session.stop, session.encode.token_id("<|endoftext|>"))
    session.rendering = TemplateRendering(session.encode)
    session.tree = Tree(session.rendering)
    plan = session.plan([SYSTEM, USER], [BASH])
    other = sampled_text(session.encode, "Yes.", stop=session.encode.token_id("<|endoftext|>"))
    reply = session.finish(plan, [SYSTEM, USER], [BASH], other)
    assert reply.content == "Yes."
    follow = session.plan([SYSTEM, USER, reply, USER], [BASH])
    assert follow.fork is ForkCause.TOKENISATION


def test_a_restored_tree_plans_the_same_and_wants_every_parent(session):
    chat = [SYSTEM, USER]
    for n in range(4):
        _, reply = session.turn(chat, called("", f"echo {n}"))
        chat = [*chat, respelled(reply), *result(reply)]
    session.turn([SYSTEM, Message("user", "Other")], "ok")
    restored = Tree(session.rendering)
    restored.restore(reversed(session.rows))
    assert len(restored) == 5
    same_plan(restored.plan(chat, [BASH]), session.plan(chat, [BASH]))
    with pytest.raises(NotFound, match="c0"):
        Tree(session.rendering).restore(session.rows[1:])
    with pytest.raises(NotFound, match="c9"):
        restored.tokens("c9")


def test_memory_is_bounded_and_the_newest_chain_is_kept():
    session = Session(max_bytes=120_000)
    chat = [SYSTEM, USER]
    for n in range(20):
        _, reply = session.turn(chat, called("", f"echo {n}"))
        chat = [*chat, respelled(reply), *result(reply)]
        session.turn([SYSTEM, Message("user", f"Side {n} " + "x" * 5000)], "ok")
    assert session.tree.size <= 120_000
    assert 0 < len(session.tree) < 40
    plan = session.plan(chat, [BASH])
    assert (plan.fork, plan.parent_id) == (None, "c38")
    with pytest.raises(NotFound):
        session.tree.tokens("c1")


def test_a_call_whose_parent_was_forgotten_meanwhile_is_kept_whole():
    session = Session(max_bytes=30_000)
    _, reply = session.turn([SYSTEM, USER], called())
    chat = [SYSTEM, USER, reply, *result(reply)]
    plan = session.plan(chat, [BASH])
    for n in range(6):
        session.turn([SYSTEM, Message("user", f"Side {n} " + "x" * 5000)], "ok")
    session.finish(plan, chat, [BASH], session.said("Done."))
    np.testing.assert_array_equal(session.tree.tokens("c7")[: len(plan.prompt)], plan.prompt)
