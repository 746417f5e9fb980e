"""Conversations that strict templates take: what each kind of template demands, and what it gets."""

import numpy as np
import pytest
from token_worlds import BASH, CHATML, THINKING, byte_tokenizer, sampled_text

from canter.tokens.conform import Demands, find_demands, settle
from canter.tokens.messages import Message, ToolCall
from canter.tokens.template import TemplateRendering

S, U, A = Message("system", "S1"), Message("user", "U1"), Message("assistant", "A1")
S2, D, U2 = Message("system", "S2"), Message("developer", "D1"), Message("user", "U2")
RESULT = Message("tool", "out", tool_call_id="x")
REMINDED = Message("tool", "out\n\nS2", tool_call_id="x")
CALL = Message("assistant", tool_calls=(ToolCall("x", "bash", '{"command": "ls"}'),))

FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not at the beginning') }}"
    "{% endif %}{% endfor %}" + CHATML
)
HOISTED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_TURN = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last %}{{ raise_exception('in turn') }}"
    "{% endif %}{% set ns.last = m.role %}{% endfor %}" + CHATML
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}"
    "{% endif %}{% endfor %}" + CHATML
)


def silent(template: str) -> str:
    """The template, made to leave later system messages out without a word."""
    return template.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'system' or messages[0] == message %}",
    )


def demands(template: str) -> Demands:
    tokenizer = byte_tokenizer(template)
    return find_demands(tokenizer.apply_chat_template)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (CHATML, Demands()),
        (THINKING, Demands()),
        (FIRST_ONLY, Demands(one_system=True, no_later_system=True)),
        (silent(CHATML), Demands(one_system=True, no_later_system=True)),
        (HOISTED, Demands(no_later_system=True)),
        (IN_TURN, Demands(one_system=True, no_rows=True)),
        (NO_SYSTEM, Demands(no_developer=True, no_system=True, one_system=True, no_later_system=True)),
        ("{{ raise_exception('nothing at all') }}", Demands()),
    ],
    ids=["chatml", "thinking", "first only", "silent", "hoisted", "in turn", "no system", "nothing"],
)
def test_what_a_template_does_not_take_is_found_out(template, found):
    assert demands(template) == found


def joined(*messages: Message) -> str:
    return "\n\n".join(m.content for m in messages)


@pytest.mark.parametrize(
    ("given", "demanded", "settled"),
    [
        ([S, D, U, S2, A, U, U2], Demands(), [S, D, U, S2, A, U, U2]),
        ([S, D, U], Demands(one_system=True), [Message("system", joined(S, D)), U]),
        ([U, S2, A, U2], Demands(no_later_system=True), [U, Message("user", "S2"), A, U2]),
        ([S, U, CALL, RESULT, S2], Demands(no_later_system=True), [S, U, CALL, REMINDED]),
        (
            [S, U, U2, A, A],
            Demands(no_rows=True),
            [S, Message("user", joined(U, U2)), Message("assistant", joined(A, A))],
        ),
        ([D, U], Demands(no_developer=True), [Message("system", "D1"), U]),
        ([S, U, A], Demands(no_system=True), [Message("user", joined(S, U)), A]),
        ([S, A, U], Demands(no_system=True), [Message("user", "S1"), A, U]),
        ([U, A], Demands(no_system=True), [U, A]),
        ([], Demands(no_system=True, no_rows=True), []),
    ],
)
def test_a_conversation_is_settled_only_as_far_as_the_template_demands(given, demanded, settled):
    assert settle(given, demanded) == settled


def test_what_follows_a_reply_has_no_beginning():
    every = Demands(no_developer=True, no_system=True, one_system=True, no_later_system=True, no_rows=True)
    assert settle([RESULT, S2, D], every, follows=True) == [Message("tool", "out\n\nS2\n\nD1", tool_call_id="x")]
    assert settle([S2, U], every, follows=True) == [Message("user", "S2\n\nU1")]
    assert settle([S2, D, U], every) == [Message("user", "S2\n\nD1\n\nU1")]


@pytest.mark.parametrize("template", [FIRST_ONLY, silent(CHATML), HOISTED, IN_TURN, NO_SYSTEM])
def test_a_conversation_with_system_messages_everywhere_is_bridged_as_it_is_rendered(template):
    tokenizer = byte_tokenizer(template)
    rendering = TemplateRendering(tokenizer)
    chat = [S, S2, U, D, U2]
    prompt = rendering.full(chat, [])
    sampled = sampled_text(tokenizer, "A1", stop=tokenizer.eos_token_id)
    longer = [*chat, A, S2, Message("user", "U3")]
    suffix = rendering.bridge(longer, [], prompt=prompt, sampled=sampled, new_from=len(chat) + 1)
    assert suffix is not None
    np.testing.assert_array_equal(np.concatenate([prompt, sampled, suffix]), rendering.full(longer, []))
    text = tokenizer.decode(rendering.full(longer, []))
    assert [text.count(m.content) for m in (S, S2, U, D, U2, A, Message("user", "U3"))] == [1, 2, 1, 1, 1, 1, 1]


def test_a_template_that_writes_no_tool_calls_is_bridged_behind_one():
    tokenizer = byte_tokenizer(CHATML)
    rendering = TemplateRendering(tokenizer)
    prompt = rendering.full([U], [BASH])
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    sampled = sampled_text(tokenizer, call, stop=tokenizer.eos_token_id)
    suffix = rendering.bridge([U, CALL, RESULT], [BASH], prompt=prompt, sampled=sampled, new_from=2)
    assert suffix is not None
    text = tokenizer.decode(np.concatenate([prompt, sampled, suffix]))
    assert text.endswith(f"{call}<|im_end|>\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n")
