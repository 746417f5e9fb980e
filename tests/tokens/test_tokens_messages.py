import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.tokens.messages import (
    Message,
    ToolCall,
    ToolSpec,
    arguments_agree,
    arrange,
    canonical_arguments,
    exact_key,
    is_issued,
    match_key,
    new_tool_call_id,
    tools_key,
)


def said(content: str = "", arguments: str | None = None, call_id: str = "call_1", **fields: object) -> Message:
    calls = () if arguments is None else (ToolCall(call_id, "bash", arguments),)
    return Message("assistant", content, tool_calls=calls, **fields)  # type: ignore[arg-type]


def test_ids_are_issued_unique_and_recognised():
    ids = {new_tool_call_id() for _ in range(1000)} | {new_tool_call_id("toolu")}
    assert len(ids) == 1001
    assert all(is_issued(i) for i in ids)
    assert not any(is_issued(i) for i in ("call_0", "call_dbe7853a670c1ba31a36", "functions.bash:4", "", "_ct"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (said("done"), said("done  \n")),
        (said("\ndone"), said("done")),
        (said("done"), said("done", reasoning="why")),
        (said("", '{"a": 1, "b": "é"}'), said("", '{ "b":"\\u00e9",\n "a":1.0 }')),
        (said("", '{"p": "/tmp"}'), said("", '{"p": "\\/tmp"}')),
        (said("", '{"a": 5000.0}'), said("", '{"a": 5e3}')),
        (said("", '{"a": 0.10}'), said("", '{"a": 0.1}')),
        (Message("tool", "out", tool_call_id="x"), Message("tool", "out\n", tool_call_id="x", name="bash")),
    ],
)
def test_what_harnesses_normalise_does_not_change_the_identity(left, right):
    assert match_key(left) == match_key(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Message("user", "done"), Message("user", " done")),
        (said("done"), Message("user", "done")),
        (said("", '{"a": 1}'), said("", '{"a": 2}')),
        (said("", '{"a": 1}'), said("", '{"a": "1"}')),
        (said("", '{"a": 1}'), said("", '{"a": true}')),
        (said("", '{"a": 0.1}'), said("", '{"a": 0.10000000000000000001}')),
        (said("", '{"a": 1, "a": 2}'), said("", '{"a": 2}')),
        (said("", '{"a": 1'), said("", '{"a": 1}')),
        (said("", "{}"), said("", "{}", call_id="call_2")),
        (Message("tool", "out", tool_call_id="x"), Message("tool", "out", tool_call_id="y")),
        (Message("user", "ab"), Message("user", "a")),
    ],
)
def test_what_means_something_else_is_another_message(left, right):
    assert match_key(left) != match_key(right)


def test_issued_ids_identify_a_turn_whatever_was_rewritten():
    call_id = new_tool_call_id()
    assert match_key(said("a", '{"x": 1}', call_id)) == match_key(said("b", '{"x": 2}', call_id))
    assert exact_key(said("a", '{"x": 1}', call_id)) != exact_key(said("a", '{"x": 2}', call_id))


@pytest.mark.parametrize(
    ("sampled", "echoed", "agree"),
    [
        ('{"file": "a", "old": "b"}', '{"replace_all": false, "old": "b", "file": "a"}', True),
        ('{"command": "cd /work && make"}', '{"command": "make"}', True),
        ('{"n": 20000}', '{"n": 20}', False),
        ('{"command": "cd /work && make  "}', '{"command": "make"}', True),
        ('{"command": "make\\n"}', '{"command": "make"}', True),
        ('{"command": "make"}', '{"command": "cd /work && make"}', False),
        ('{"command": "ma ke"}', '{"command": "make"}', False),
        ('{"command": "make"}', '{"__unparsedToolInput": {"raw": "{\\"command\\": \\"make\\"}", "len": 19}}', True),
        ("{broken", '{"__unparsedToolInput": {"raw": "{broken", "len": 7}}', True),
        ("{broken, and long", '{"__unparsedToolInput": {"raw": "{broken", "len": 17}}', True),
        ("{broken", '{"__unparsedToolInput": {"raw": "{other", "len": 6}}', False),
        ("{broken", '{"__unparsedToolInput": {"raw": "", "len": 7}}', False),
        ("{broken", '{"__unparsedToolInput": 1}', False),
        ('{"a": 1}', '{"_openhands_malformed_tool_call": true, "error": "no"}', False),
        ('{"a": 1}', "{}", False),
        ("{broken", "{broken ", True),
        ("{broken", "{}", False),
        ('{"a": [1, {"b": 2}]}', '{"a": [1, {"b": 2, "c": null}]}', True),
    ],
)
def test_arguments_agree_only_where_a_harness_adds_or_normalises(sampled, echoed, agree):
    assert arguments_agree(sampled, echoed) is agree


def results(*ids: str) -> list[Message]:
    return [Message("tool", f"result of {i}", tool_call_id=i) for i in ids]


def test_parallel_results_are_a_set_in_the_order_of_their_calls():
    call = Message("assistant", tool_calls=tuple(ToolCall(i, "bash", "{}") for i in "abc"))
    user = Message("user", "Go on.")
    wanted = (user, call, *results("a", "b", "c"), user)
    for order in ("abc", "cab", "bca"):
        assert arrange([user, call, *results(*order), user]) == wanted
    assert arrange([call, *results("c", "a")]) == (call, *results("a", "c"))
    assert arrange([call, *results("x", "b", "y", "a")]) == (call, *results("a", "b", "x", "y"))
    split = [call, *results("b"), user, *results("a")]
    assert arrange(split) == tuple(split)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values)
def test_canonical_arguments_ignore_spelling_and_nothing_else(value):
    import json

    plain = json.dumps(value)
    spaced = json.dumps(value, indent=3, ensure_ascii=False, sort_keys=True)
    assert canonical_arguments(plain) == canonical_arguments(spaced)
    assert canonical_arguments(plain) != canonical_arguments(json.dumps([value]))


@given(text=st.text(max_size=30))
def test_any_text_has_a_canonical_form(text):
    assert canonical_arguments(text) == canonical_arguments(text)
    match_key(said(text, text))


def test_extremes_have_canonical_forms():
    for text in ("1e999999999999", "9" * 5000, "[" * 100_000, '{"a": NaN}', '"\\ud800"'):
        assert canonical_arguments(text)


def test_tools_are_told_apart_by_everything_a_template_shows():
    tool = ToolSpec("bash", "Runs.", {"type": "object"})
    assert tools_key([]) == b""
    assert tools_key([tool]) == tools_key([ToolSpec("bash", "Runs.", {"type": "object"})])
    others = ([ToolSpec("sh", "Runs.", {"type": "object"})], [ToolSpec("bash", "", {"type": "object"})], [tool, tool])
    assert len({tools_key([tool]), *(tools_key(o) for o in others)}) == 4
    assert tools_key([ToolSpec("big", "", {"maximum": 2**70})])
