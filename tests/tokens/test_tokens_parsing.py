import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.tokens.parsing import Parsed, parse_reply


def read(text: str, *, in_reasoning: bool = False, calls_tools: bool = True) -> Parsed:
    return parse_reply(text, thinks=True, in_reasoning=in_reasoning, calls_tools=calls_tools)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_reasoning_content_and_parallel_calls_are_told_apart():
    text = "<think>\nhm\n</think>\n\nLook.\n" + call('{"name": "a", "arguments": {"x":  1}}') + "\n"
    text += call('{"arguments": {"y": "</tool_call>"}, "name": "b"}')
    assert read(text) == Parsed("Look.", "hm", (("a", '{"x":  1}'), ("b", '{"y": "</tool_call>"}')))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "a", "arguments": {"x": 1,}}',
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "a", "arguments": {}} trailing',
        "[]",
        "",
        "{" * 50_000,
    ],
)
def test_a_malformed_call_stays_in_the_content_and_is_counted(body):
    text = "before " + call(body) + " after"
    assert read(text) == Parsed(text, None, (), 1)


def test_a_good_call_beside_a_malformed_one_counts():
    broken = call('{"name": "a", "arguments": {')
    reply = read(broken + call('{"name": "b", "arguments": {}}'))
    assert reply == Parsed(broken, None, (("b", "{}"),), 1)


def test_a_call_at_the_end_may_lack_its_closing_tag_but_not_its_json():
    assert read('<tool_call>{"name": "a", "arguments": {}}').tool_calls == (("a", "{}"),)
    assert read('<tool_call>{"name": "a", "argum') == Parsed('<tool_call>{"name": "a", "argum', None, (), 1)


def test_without_tools_a_call_is_text():
    text = call('{"name": "a", "arguments": {}}')
    assert read(text, calls_tools=False) == Parsed(text)


def test_reasoning_opened_by_the_prompt_and_cut_reasoning():
    assert read("hm\n</think>\n\nyes", in_reasoning=True) == Parsed("yes", "hm")
    assert read("hm", in_reasoning=True) == Parsed("", "hm")
    assert read("<think>hm") == Parsed("", "hm")
    assert read("so </think> yes") == Parsed("so </think> yes")
    assert parse_reply("<think>x</think>y", thinks=False, in_reasoning=False, calls_tools=True).content.startswith(
        "<th"
    )


def test_a_call_inside_reasoning_is_no_call():
    text = "<think>" + call('{"name": "a", "arguments": {}}') + "</think>done"
    assert read(text).tool_calls == ()


def test_arguments_spelled_as_a_string_are_unwrapped():
    inner = '{"x": "é"}'
    assert read(call(json.dumps({"name": "a", "arguments": inner}))).tool_calls == (("a", inner),)


@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), st.text() | st.integers()), text=st.text())
def test_what_was_written_is_read(name, arguments, text):
    written = json.dumps(arguments, ensure_ascii=False)
    body = f'{{"name": {json.dumps(name)}, "arguments": {written}}}'
    reply = read(text.replace("<", "") + call(body))
    assert reply.tool_calls == ((name, written),)
    assert reply.content == text.replace("<", "").strip()


pieces = st.sampled_from([*'{}[]":,ab \n<>', "<tool_call>", "</tool_call>", '"name":', '"arguments":', '"x"', "{}"])


@given(text=st.lists(pieces).map("".join))
def test_any_text_parses_and_without_calls_nothing_is_lost(text):
    reply = parse_reply(text, thinks=False, in_reasoning=False, calls_tools=True)
    assert reply.content == text or reply.tool_calls
