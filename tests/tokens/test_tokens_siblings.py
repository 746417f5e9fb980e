"""Two replies to the same prompt that a history has one behind the other."""

from __future__ import annotations

from test_tokens_tree import SYSTEM, USER, Session, called, result

from canter.tokens.messages import Message
from canter.types import ForkCause


def test_a_turn_whose_stream_broke_stands_before_the_one_that_was_asked_for_then() -> None:
    """OpenCode runs the tools of a reply that broke off behind its last item, asks again, and keeps both."""
    session = Session()
    _, broken = session.turn([SYSTEM, USER], called("", "ls"))
    _, again = session.turn([SYSTEM, USER], called("", "ls"))
    history: list[Message] = [SYSTEM, USER, broken, *result(broken), again, *result(again)]
    plan, _ = session.turn(history, "Done.")
    assert (plan.proposed_parent_id, plan.fork) == ("c1", ForkCause.EDITED_HISTORY)
    assert plan.parent_id == "c0", "its tokens go on from the first of them"
