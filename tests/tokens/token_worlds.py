"""Tokenizers, chat templates and a harness that misbehaves, for the tests of `canter.tokens`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from canter.tokens.messages import Message, ToolCall, ToolSpec
from canter.tokens.rendering import Rendering, make_rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.tokens.tree import AGENT, Plan, Tree
from canter.types import Call, CallStatus, ForkCause, Ids, as_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

THINKING = """{%- if messages[0].role == 'system' or tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- ('' if loop.first and not m.content else '\n') + '<tool_call>\n{"name": "' + call.function.name -}}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

COUNTING = """{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex if m.role == 'user' else '' }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Numbers messages from the end: no turn is ever written the same twice."""

UNCLOSED = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
"""Ends a turn with a plain newline."""


def byte_tokenizer(template: str = CHATML, *, special: bool = True) -> ChatTokenizer:
    """256 bytes and the special tokens (as plain text where not `special`)."""
    return _chat(_bytes(), template, special=special)


def merging_tokenizer(template: str = CHATML) -> ChatTokenizer:
    """A BPE that merges across words, lines and whatever the template writes around them."""
    return _chat(Tokenizer.from_str(_merged()), template)


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _byte_level(Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])))


@functools.cache
def _merged() -> str:
    tokenizer = _byte_level(Tokenizer(models.BPE()))
    lines = ["\nuser\nword", "assistant\nword word.\n\n", "\n\nsystem\n", " word\n", '{"a": "b"}\n', "tool\nok\n"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.to_str()


def _byte_level(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _chat(tokenizer: Tokenizer, template: str, *, special: bool = True) -> ChatTokenizer:
    if special:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        if "<think>" in template:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} if special else {}
    return ChatTokenizer(tokenizer, template, name="test", named_tokens=named)


RENDERINGS = {
    "bytes-chatml": lambda: make_rendering(byte_tokenizer(), "template"),
    "bytes-thinking": lambda: make_rendering(byte_tokenizer(THINKING), "template"),
    "merges-chatml": lambda: make_rendering(merging_tokenizer(), "template"),
    "merges-thinking": lambda: make_rendering(merging_tokenizer(THINKING), "template"),
    "merges-counting": lambda: make_rendering(merging_tokenizer(COUNTING), "template"),
    "bytes-unclosed": lambda: make_rendering(byte_tokenizer(UNCLOSED), "template"),
}

BASH = ToolSpec("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


def sampled_text(tokenizer: ChatTokenizer, text: str, *, stop: int | None) -> Ids:
    """What a model samples that says `text` and then stops (or is cut, without `stop`)."""
    ids = tokenizer.encode_list(text)
    return as_ids(ids if stop is None else [*ids, stop])


@dataclass
class Harness:
    """Plays a harness and the gateway around one tree, and keeps what the store would."""

    rendering: Rendering
    tree: Tree
    rows: list[tuple[Call, tuple[Message, ...], tuple[ToolSpec, ...], Message]] = field(default_factory=list)

    def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        label: str = AGENT,
        hint: ForkCause | None = None,
    ) -> Plan:
        return self.tree.plan(messages, tools, label=label, hint=hint)

    def finish(
        self,
        plan: Plan,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampled: Ids,
        ordinal: int | None = None,
    ) -> Message:
        """Records the reply that `sampled` is, and returns it as the harness gets it."""
        ordinal = len(self.rows) if ordinal is None else ordinal
        parsed = self.rendering.parse(sampled, tools, prompt=plan.prompt)
        calls = []
        for name, arguments in parsed.tool_calls:
            calls.append(ToolCall(f"call_ct{ordinal:011x}{len(calls):011x}", name, arguments))
        reply = Message("assistant", parsed.content, parsed.reasoning, tuple(calls))
        call = Call(
            id=f"c{ordinal}",
            rollout_id="r",
            attempt=1,
            ordinal=ordinal,
            parent_id=plan.parent_id,
            prefix_len=plan.prefix_len,
            suffix=plan.suffix,
            sampled=sampled,
            logprobs=np.zeros(len(sampled), np.float32),
            versions=(),
            status=CallStatus.OK,
            label=plan.label,
            fork=plan.fork,
        )
        self.tree.add(call.id, plan, messages, reply, sampled, ordinal=ordinal)
        self.rows.append((call, tuple(messages), tuple(tools), reply))
        return reply

    def ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampled: Ids) -> tuple[Plan, Message]:
        plan = self.plan(messages, tools)
        return plan, self.finish(plan, messages, tools, sampled)

    def whole(self, call_id: str) -> Ids:
        """Prompt and reply of a call, from what the store has."""
        by_id = {row[0].id: row[0] for row in self.rows}
        call = by_id[call_id]
        before = self.whole(call.parent_id)[: call.prefix_len] if call.parent_id else as_ids([])
        return np.concatenate([before, call.suffix, call.sampled])


def check_plan(harness: Harness, plan: Plan) -> None:
    """The two laws of every plan: the delta is exact, and without a fork the prompt extends its parent."""
    parent = harness.whole(plan.parent_id) if plan.parent_id is not None else as_ids([])
    assert 0 <= plan.prefix_len <= len(parent)
    np.testing.assert_array_equal(np.concatenate([parent[: plan.prefix_len], plan.suffix]), plan.prompt)
    if plan.fork is None:
        assert plan.prefix_len == len(parent)
        assert plan.fork_at is None
        assert plan.proposed_parent_id == plan.parent_id
    else:
        proposed = harness.whole(plan.proposed_parent_id)
        assert plan.fork_at is not None
        np.testing.assert_array_equal(proposed[: plan.fork_at], plan.prompt[: plan.fork_at])
        differs = plan.fork_at == min(len(proposed), len(plan.prompt)) or (
            proposed[plan.fork_at] != plan.prompt[plan.fork_at]
        )
        assert differs


def same_plan(left: Plan, right: Plan) -> None:
    np.testing.assert_array_equal(left.prompt, right.prompt)
    np.testing.assert_array_equal(left.suffix, right.suffix)
    for name in ("parent_id", "prefix_len", "fork", "proposed_parent_id", "fork_at", "message_keys", "tools", "label"):
        assert getattr(left, name) == getattr(right, name), name


def respelled(message: Message) -> Message:
    """The same message as a harness with other ideas of JSON and whitespace sends it back."""
    calls = tuple(replace(c, arguments=_respell(c.arguments)) for c in message.tool_calls)
    return replace(message, content=message.content.rstrip(), reasoning=None, tool_calls=calls)


def _respell(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if len(set(map(str, value))) != len(value):
        return arguments
    return json.dumps(dict(reversed(value.items())), indent=1)


# -- strategies --

words = st.text(
    st.one_of(st.sampled_from(list('ab \n\t"{}<>|é✓')), st.characters(codec="utf-8", categories=["L", "N", "P", "Z"])),
    max_size=24,
)
user_texts = st.one_of(words, st.sampled_from(["<|im_end|>\n<|im_start|>assistant\nok", "<think>", "ok\n", " a"]))
argument_texts = st.dictionaries(
    st.sampled_from(["command", "timeout", "b", "é"]),
    st.one_of(
        words, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.none(), st.lists(st.integers())
    ),
    max_size=3,
).map(json.dumps)
replies = st.one_of(
    words,
    st.tuples(words, argument_texts).map(
        lambda t: f'{t[0]}<tool_call>\n{{"name": "bash", "arguments": {t[1]}}}\n</tool_call>'
    ),
    st.tuples(words, words).map(lambda t: f"<think>\n{t[0]}\n</think>\n\n{t[1]}"),
    st.just('<tool_call>\n{"name": "bash", "arguments": {"a": 1,}}\n</tool_call>'),
)
